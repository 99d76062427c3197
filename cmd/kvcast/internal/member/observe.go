package member

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kvcast/kvcast/internal/journal/jetstream"
)

// Observe takes part until ctx ends, for an instance that ingests nothing: it writes heartbeats, if the NATS user may, and
// knows the instances and the owners of workers.
func (m *Member) Observe(ctx context.Context) {
	var watching sync.WaitGroup
	defer watching.Wait()
	watching.Go(func() { m.confirm(ctx) })
	if !m.openBucket(ctx) {
		return
	}
	watching.Go(func() { m.watch(ctx, m.kv, &m.bucket.rewatch, m.instanceChanged, func() {}) })
	ticker := time.NewTicker(m.cfg.TTL / 3)
	defer ticker.Stop()
	for denied := false; ; {
		if !denied {
			err := m.tryHeartbeat(ctx)
			if denied = errors.Is(err, jetstream.ErrDenied); denied {
				m.cfg.Log.Info("other instances do not list this one", "error", err)
			}
		}
		m.mu.Lock()
		_, _ = m.machine.Next(time.Now()) // finds the dead instances; it requests nothing before Machine.Loaded
		m.mu.Unlock()
		select {
		case <-ticker.C:
			continue
		case <-ctx.Done():
		}
		if !denied {
			leaving, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
			defer cancel()
			if err := m.kv.Delete(leaving, m.cfg.ID); err != nil {
				m.cfg.Log.Debug("others hold this instance for live for a while", "error", err)
			}
		}
		return
	}
}

// openBucket opens the bucket of the instances, which the first that ingests creates. It reports whether it has, before ctx ended.
func (m *Member) openBucket(ctx context.Context) bool {
	for {
		kv, err := m.parts.Journal.Instances(ctx)
		if err == nil {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.kv = kv
			return true
		}
		m.cfg.Log.Debug("the instances are not known yet", "error", err)
		select {
		case <-time.After(watchRetry):
		case <-ctx.Done():
			return false
		}
	}
}
