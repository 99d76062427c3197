package serve

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/member"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/recovery"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
)

// replica is the mode of a server that reads no engines. It serves what others write to the journal.
type replica struct{ clustered }

func openReplica(ctx context.Context, s *Service) (mode, error) {
	c, err := openClustered(ctx, s, jetstream.Config{Follow: true})
	return replica{c}, err
}

func (r replica) recover(ctx context.Context) ([]ingestconfig.Worker, error) {
	s := r.s
	if err := recovery.Replicate(ctx, r, r.Checkpoints(), s.log, &r.progress, s.follower.Index()); err != nil {
		return nil, err
	}
	r.Pin(s.follower.Index().Seq())
	r.member.Attach(member.Parts{Journal: r.Journal, Follower: s.follower, Overpredicted: s.server.Overpredicted, Address: s.Addr()})
	r.recovering.Store(false)
	return nil, nil
}

func (r replica) run(ctx context.Context, _ []ingestconfig.Worker, grpcDone, portsDone <-chan error) error {
	s := r.s
	starting, stopStarting := context.WithCancel(ctx)
	defer stopStarting()
	following, stopFollowing := context.WithCancel(context.WithoutCancel(ctx))
	defer stopFollowing()
	followDone := background(func() error { return s.follower.Run(following) })
	startDone := background(func() error { s.serveFrom(starting); return nil })
	watchDone := background(func() error { return r.beside(starting, nil, nil) })
	observeDone := background(func() error { r.member.Observe(starting); return nil })

	var failure error
	select {
	case <-ctx.Done():
	case failure = <-grpcDone:
	case failure = <-portsDone:
	case failure = <-followDone:
		failure = fmt.Errorf("follow the journal: %w; kvcast exits, because snapshots and matches would be outdated: restart kvcast", failure)
	case failure = <-watchDone:
	}
	s.server.StopServing() // first, so that clients go elsewhere
	s.ending.WaitsFor("the journal, to stop reading it")
	stopStarting()
	errs := []error{failure, <-startDone, <-watchDone, <-observeDone}
	s.log.Info("shutting down")
	stopFollowing()
	errs = append(errs, <-followDone)
	return errors.Join(errs...)
}

func (r replica) beside(ctx context.Context, _ []ingestconfig.Worker, _ <-chan struct{}) error {
	return r.watch(ctx, func(time.Time) { r.lookAtStream() })
}
