package jetstream

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
)

// retentionInterval is the time between two looks at what can be removed from the stream.
const retentionInterval = time.Second

// retention removes the entries from the stream that the mirror has evicted and that recovery does not need.
type retention struct {
	j       *Journal
	after   atomic.Uint64 // entries after it stay in the stream
	changed chan struct{} // after was set
	purged  uint64        // last seq that was removed from the stream; used by the loop, and by Load before it
}

// Retain makes the stream keep all entries after a seq until the next call. It removes earlier ones when the mirror
// has evicted them. Until the first call, the stream keeps all entries.
func (j *Journal) Retain(seq uint64) {
	j.retention.after.Store(seq)
	signal(j.retention.changed)
}

// loop removes entries until the journal fails or ends.
func (r *retention) loop() {
	ticker := time.NewTicker(retentionInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-r.changed:
		case <-r.j.failed:
			return
		case <-r.j.ctx.Done():
			return
		}
		if err := r.j.mode.maintain(); err != nil {
			r.j.fail(err)
			return
		}
		if err := r.purge(r.j.ctx); err != nil && r.j.ctx.Err() == nil {
			r.j.log.Warn("The stream keeps more entries than it should: they cannot be purged.", "error", err)
		}
	}
}

func (r *retention) purge(ctx context.Context) error {
	evicted := r.j.mirror.Load().Bounds().Oldest - 1
	until := r.j.mode.purgeable(evicted, min(evicted, r.after.Load()))
	if until <= r.purged {
		return nil
	}
	if err := r.j.mode.purging(until); err != nil {
		return err
	}
	s, _, err := r.j.client.StreamInfo(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, client.RequestTimeout)
	defer cancel()
	if err := s.Purge(ctx, jetstream.WithPurgeSequence(until+1)); err != nil {
		return err
	}
	r.purged = until
	return nil
}
