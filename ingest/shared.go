package ingest

import (
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/transport"
	"github.com/kvcast/kvcast/internal/budget"
)

// shared is what all workers of an Ingest have in common.
type shared struct {
	sink    feed.Sink
	sockets *transport.Context
	replays *transport.Requests
	// reconnectMin and reconnectMax bound the backoff of reconnecting.
	reconnectMin, reconnectMax time.Duration
	roster                     *roster
	sources                    sourceList
	budgets                    budgets
	metrics                    *metrics
	intakes                    sync.Pool
	batches                    transport.Pool
	silence                    time.Duration // 0: it is no sign of anything
	grace                      time.Duration
	log                        *slog.Logger
}

func (s *shared) intake() *intake {
	if in, ok := s.intakes.Get().(*intake); ok {
		return in
	}
	return new(intake)
}

func (s *shared) giveBack(in *intake) { s.intakes.Put(in) }

// budgets bound what all publishers together may take.
type budgets struct {
	received  *budget.Budget // bytes of messages that wait to be processed
	reordered *budget.Budget // bytes of batches held back for a repair
	sources   *budget.Budget // publishers: a source at a dp rank
	ranks     *budget.Budget // dp ranks that only their batches have named
	workers   *budget.Budget // bytes of what is said of workers
	rules     *budget.Budget // bytes of what wire.Rules remember
}

func newBudgets(c config.Config) budgets {
	return budgets{
		received:  budget.New("receive_buffer_bytes", c.ReceiveBufferBytes),
		reordered: budget.New("reorder_buffer_bytes", c.ReorderBufferBytes),
		sources:   budget.New("sources", int64(c.MaxSources)),
		ranks:     budget.New("ranks", int64(c.MaxRanks)),
		workers:   budget.New("worker_bytes", c.WorkerBytes),
		rules:     budget.New("salt_bytes", c.SaltBytes),
	}
}

func (b budgets) all() budget.Collector {
	return budget.Collector{b.received, b.reordered, b.sources, b.ranks, b.workers, b.rules}
}

// inbox returns the configuration of an inbox, of a worker or, where that is empty, of a
// listener.
func (s *shared) inbox(worker string) transport.InboxConfig {
	dropped := s.metrics.undelivered.WithLabelValues(worker)
	return transport.InboxConfig{
		Budget: s.budgets.received, Pool: &s.batches, OnDrop: func(n int) { dropped.Add(float64(n)) },
	}
}

// jitter returns a wait that is up to a fifth longer, so that many that began
// together do not stay together.
func jitter(wait time.Duration) time.Duration {
	return wait + time.Duration(rand.Int64N(int64(wait)/5+1))
}
