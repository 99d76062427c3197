package ingest

import (
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/internal/sequence"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/delay"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/loglimit"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/configured"
	"github.com/kvcast/kvcast/internal/zmtp"
)

// shared has what all workers of an Ingest use.
type shared struct {
	config     config.Config // with defaults
	sink       feed.Sink
	transports *configured.Transports
	replays    *transport.Requests
	delay      delay.Meter
	names      *nameSet
	sockets    socketSet
	recovered  recovered
	// entered has the workers in the stream: *worker by name.
	entered   sync.Map
	sources   sourceList
	addresses *budget.Shares // sources that engines have made known to listeners: no address can use up MaxSources
	budgets   budgets
	metrics   *metrics
	intakes   sync.Pool
}

// intake returns an intake for batches that are decoded with the mutex of a worker held; nil for none.
func (s *shared) intake(w *worker) *intake {
	in, ok := s.intakes.Get().(*intake)
	if !ok {
		in = &intake{budgets: &s.budgets}
	}
	in.slot = &in.own
	if w != nil {
		in.slot = &w.decode
	}
	return in
}

// inStream returns the worker of a name that is in the stream; nil if there is none.
func (s *shared) inStream(name string) *worker {
	w, _ := s.entered.Load(name)
	in, _ := w.(*worker)
	return in
}

// recycle ends the use of an intake, which is released.
func (s *shared) recycle(in *intake) {
	in.arrival, in.topic, in.decoded = sequence.Batch{}, nil, nil
	s.intakes.Put(in)
}

// budgets limit the resources of all publishers together.
type budgets struct {
	received  *budget.Budget      // bytes of messages that wait to be processed
	reordered *budget.Budget      // bytes of the reorder buffers
	sources   *budget.Budget      // publishers: one for each source and dp rank
	ranks     *budget.Budget      // dp ranks that are known only from batches
	workers   *budget.Budget      // bytes of the strings in workers' configs
	pools     *budget.Budget      // bytes of the contents of blocks in pools
	rules     *budget.Budget      // bytes of the state of wire.Rules
	decoding  *budget.Budget      // bytes of large payloads that are decoded and processed
	decode    *semaphore.Weighted // of decoding
	parts     parts
}

func newBudgets(c config.Config) budgets {
	b := budgets{
		received:  budget.New("receive_buffer_bytes", c.ReceiveBufferBytes),
		reordered: budget.New("reorder_buffer_bytes", c.ReorderBufferBytes),
		sources:   budget.New("sources", int64(c.MaxSources)),
		ranks:     budget.New("ranks", int64(c.MaxRanks)),
		workers:   budget.New("worker_bytes", c.WorkerBytes),
		rules:     budget.New("salt_bytes", c.SaltBytes),
		pools:     budget.New("pool_bytes", c.PoolBytes),
		decoding:  budget.New("decoding_bytes", maxDecoding),
		decode:    semaphore.NewWeighted(maxDecoding),
	}
	b.parts = parts{budget.NewParts(b.reordered), budget.NewParts(b.ranks), budget.NewParts(b.rules)}
	return b
}

// parts are the parts of budgets of the addresses that name workers.
type parts struct{ reordered, ranks, rules *budget.Parts }

// workerBudgets are the budgets of a worker: parts of its peer, if an address has named it.
type workerBudgets struct{ reordered, ranks, rules *budget.Budget }

func (p parts) open(peer netip.Addr) workerBudgets {
	return workerBudgets{p.reordered.Open(peer), p.ranks.Open(peer), p.rules.Open(peer)}
}

func (p parts) close(peer netip.Addr) {
	for _, all := range []*budget.Parts{p.reordered, p.ranks, p.rules} {
		all.Close(peer)
	}
}

func (b budgets) all() budget.Collector {
	return budget.Collector{b.received, b.reordered, b.sources, b.ranks, b.workers, b.rules, b.pools, b.decoding}
}

// reject counts and logs the rejection of a peer that has connected to a listener.
func (s *shared) reject(peer netip.Addr, err *zmtp.Error) {
	s.metrics.peersRejected.WithLabelValues(string(err.Reason)).Inc()
	s.config.Logger.Warn("peer disconnected", loglimit.PeerAddress, peer, "reason", string(err.Reason), "error", err)
}

// jitter returns a wait that is up to a fifth longer, so that waits that start together end apart.
func jitter(wait time.Duration) time.Duration {
	return wait + time.Duration(rand.Int64N(int64(wait)/5+1))
}

// nameSet is the set of the names of an Ingest's workers.
type nameSet struct {
	max int

	mu sync.Mutex // guards names
	// names are the names in use. The value reports whether it is only that of a recovered worker.
	names map[string]bool
}

// claim adds a name. If ok is false, why is the reason. recovered reports whether the name of a recovered worker may be claimed.
func (r *nameSet) claim(name string, recovered bool) (why refusal, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	unclaimed, taken := r.names[name]
	switch {
	case taken && (!unclaimed || !recovered):
		return refusedTaken, false
	case !taken && len(r.names) >= r.max:
		return refusedWorkers, false
	}
	r.names[name] = false
	return 0, true
}

// reserveRecovered adds the name of a recovered worker, unless it is in use. It is released by releaseRecovered, unless it is
// claimed before.
func (r *nameSet) reserveRecovered(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, taken := r.names[name]; !taken {
		r.names[name] = true
	}
}

func (r *nameSet) releaseRecovered(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.names[name] {
		delete(r.names, name)
	}
}

// reserve adds a name of the configuration, which is unique.
func (r *nameSet) reserve(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.names[name] = false
}

// release removes a name.
func (r *nameSet) release(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.names, name)
}

// socketSet is the set of the sockets of an Ingest's workers.
type socketSet struct {
	mu  sync.Mutex // guards all
	all config.SocketSet
}

// claim adds the sockets of a worker. It returns an error that names the other worker if another one has one of them.
func (s *socketSet) claim(w config.Worker) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all.Add(w)
}

// release removes the sockets of a worker, if it has any.
func (s *socketSet) release(worker string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all.Remove(worker)
}
