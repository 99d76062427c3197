package serve

import (
	"context"
	"errors"
	"fmt"
)

// runReplica serves what another server writes to the journal, until ctx is done or a part fails.
func (s *Service) runReplica(ctx context.Context, grpcDone, portsDone <-chan error) error {
	starting, stopStarting := context.WithCancel(ctx)
	defer stopStarting()
	following, stopFollowing := context.WithCancel(context.WithoutCancel(ctx))
	defer stopFollowing()
	followDone := background(func() error { return s.follower.Run(following) })
	startDone := background(func() error { s.serveFrom(starting); return nil })
	watchDone := background(func() error { return s.durable.watch(starting, s) })
	observeDone := background(func() error { s.durable.member.Observe(starting); return nil })

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
