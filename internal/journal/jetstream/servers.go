package jetstream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/checkpoints"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/kv"
)

// connect connects to Config.Servers. It reconnects without a limit of attempts.
func (s *shared) connect(context.Context) error {
	cfg, opts := &s.j.cfg, s.j.options()
	if cfg.Credentials != "" {
		opts = append(opts, nats.UserCredentials(cfg.Credentials))
	}
	if cfg.TLSCA != "" {
		opts = append(opts, nats.RootCAs(cfg.TLSCA))
	}
	if cfg.TLSCert != "" {
		opts = append(opts, nats.ClientCert(cfg.TLSCert, cfg.TLSKey))
	}
	err := s.j.client.Connect(func(o *nats.Options) error {
		o.Servers = cfg.Servers
		return nil
	}, opts...)
	if err != nil {
		return fmt.Errorf("connect to %v: %w", cfg.Servers, err)
	}
	if v := s.j.client.Conn.ConnectedServerVersion(); !syncsCompaction(v) {
		s.j.log.Warn("the NATS server may lose acknowledged entries if its machine crashes, also with sync_interval: always: it does not sync what compaction rewrites; "+
			"want nats-server 2.14.6 or later", "version", v)
	}
	return nil
}

// syncsCompaction reports whether nats-server of a version syncs the files that compaction rewrites, if it is to sync
// always: 2.14.6 and later do. It returns true for a version that it cannot parse.
func syncsCompaction(version string) bool {
	var v [3]int
	if n, _ := fmt.Sscanf(version, "%d.%d.%d", &v[0], &v[1], &v[2]); n < len(v) {
		return true
	}
	return slices.Compare(v[:], []int{2, 14, 6}) >= 0
}

// IsUnanswered reports whether an error of a journal in Servers means that they may answer when they are asked again.
func IsUnanswered(err error) bool {
	return client.IsUnanswered(err) || errors.Is(err, context.DeadlineExceeded)
}

func (s *shared) createStream(ctx context.Context) (streamState, error) {
	return s.j.createStream(ctx, labelShared)
}

func (s *shared) adoptStream(ctx context.Context, info *jetstream.StreamInfo) (streamState, error) {
	return s.j.adoptStream(ctx, info, labelShared)
}

func labelShared(c *jetstream.StreamConfig) {
	label(c, format, "", false)
	c.AllowAtomicPublish = true
}

func (s *shared) openStores(ctx context.Context) error {
	err := s.j.client.UntilPermitted(ctx, func() (err error) {
		s.j.checkpoints, err = checkpoints.Open(ctx, s.j.client, s.j.host(s), 2*checkpoints.Timeout)
		return err
	})
	if err != nil {
		return err
	}
	return s.j.client.UntilPermitted(ctx, func() (err error) {
		s.j.registrations, err = kv.OpenInServers(ctx, s.j.client, s.j.checkpoints.NewestRegistration)
		return err
	})
}

// SyncEntries implements durability: the servers' configuration decides.
func (s *shared) SyncEntries() error { return nil }

// CheckpointsStuck implements durability: the servers may be back at any time.
func (s *shared) CheckpointsStuck(time.Duration) {}

func (s *shared) mark(first uint64) { s.marked = first }

func (s *shared) checkRange(first, _ uint64) error {
	if first != s.marked {
		return ErrPurged
	}
	return nil
}

func (s *shared) continueAfter(string, uint64, uint64) error { return nil }

func (s *shared) isPurged(ctx context.Context, seq uint64) (bool, error) { // a former owner may do so
	_, info, err := s.j.client.StreamInfo(ctx)
	return err == nil && info.State.FirstSeq > seq, err
}

func (s *shared) endEpoch(ctx context.Context, epoch string) error {
	instances, err := kv.OpenInstances(ctx, s.j.client)
	if err != nil {
		return err
	}
	return instances.EndEpoch(ctx, epoch, s.j.replies) // a random subject of this process
}

func (s *shared) renameEpoch(ctx context.Context, config *jetstream.StreamConfig) error {
	config.Metadata[metadataEpoch] = journal.NewEpoch()
	return s.j.updateStream(ctx, *config)
}

func (s *shared) newest() uint64 { return 0 }

func (s *shared) maintain() error { return nil }

func (s *shared) purgeable(evicted, until uint64) uint64 {
	s.renew(evicted + 1)
	return min(until, s.firstRecord(until+1)-1)
}

func (s *shared) purging(uint64) error { return nil }

func (s *shared) syncMetadata() error { return nil }

func (s *shared) close() error { return nil }

// follower is the mode of a journal in Servers with Config.Follow: it reads the stream of a shared one, and changes nothing.
type follower struct{ *shared }

func (f follower) createStream(context.Context) (streamState, error) {
	return streamState{}, fmt.Errorf("open %s: the stream does not exist; start an instance that reads engines first", f.j.client.Place())
}

func (follower) adoptStream(_ context.Context, info *jetstream.StreamInfo) (streamState, error) {
	return stateOf(info), nil
}

// openStores opens the checkpoints. The processes that append have the workers.
func (f follower) openStores(ctx context.Context) error {
	return f.j.client.UntilPermitted(ctx, func() (err error) {
		f.j.checkpoints, err = checkpoints.Follow(ctx, f.j.client, f.j.host(f))
		return err
	})
}

func (f follower) start() { f.j.loops.Go(f.readLoop) }
