// Package smg publishes the events of workers as engines of SMG do, by SubscribeKvEvents, for gateways that read engines by gRPC.
//
// In: the entries of a journal, and the index that has applied them. Out: for each subscriber the events of the worker that the
// call's authority names. Guarantee: a subscriber that has applied all batches holds the blocks of the index, except those that
// vllm.Omission describes. Sequence numbers of a worker are above 0 and contiguous. Each subscriber reads a bounded history at
// its own pace; one that falls behind it gets an error, and one that reads nothing is disconnected. Others are not delayed.
package smg

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/kvcast/kvcast/internal/adapter/apply"
	"github.com/kvcast/kvcast/internal/adapter/vllm"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Config configures a Service.
type Config struct {
	// Workers are the names of workers by the authority of calls. Without an element, an authority names the worker whose
	// address for requests it is, or whose name is the authority or its host.
	Workers map[string]string
	// HistoryBytes bounds the batches of all workers that are kept, except for minHistory of each.
	HistoryBytes int
	// StateBytes bounds the memory of blocks that are being sent to subscribers.
	StateBytes     int64
	MaxSubscribers int
	// StallTimeout is for how long a subscriber may read nothing while batches wait; 0: 30 s.
	StallTimeout time.Duration
	Logger       *slog.Logger
	Registerer   prometheus.Registerer
}

// Service is the events of all workers.
type Service struct {
	cfg     Config
	journal journal.Reader
	index   *index.Index
	slots   *budget.Shares // subscribers
	states  *budget.Shares // states that are being built
	memory  *budget.Budget // of states
	shares  *budget.Shares // of memory
	metrics metrics

	mu      sync.Mutex // guards all below, and the workers
	workers map[string]*worker
	running bool
	least   uint64        // above the sequence numbers of all workers that were removed, as of rank 0
	stopped chan struct{} // closed by stop
	stop    func()
}

type metrics struct {
	subscribers prometheus.Gauge
	states      prometheus.Counter
	behind      prometheus.Counter
	stalled     prometheus.Counter
	omitted     vllm.Omitted
}

// worker is what was published of a worker.
type worker struct {
	name, address string
	ranks         map[uint32]*rankStream
	began         uint64 // the first sequence number of rank 0
	first         uint64 // the position of the first batch of history
	history       []published
	bytes         int
	events        uint64 // published so far
	ended         bool
	changed       chan struct{} // closed when history grows or the worker ends
}

// rankStream is the events of a dp rank. Each rank has contiguous sequence numbers, as engines have, which publish the ranks apart
// from each other.
type rankStream struct {
	*vllm.Stream        // without pending events, when the lock is free
	next         uint64 // the sequence number of the next batch
	// resumable is the least sequence number from which a subscriber may continue: that of the last batch of the newest state. The
	// batches of a state have the numbers of live batches before it, so a lower number may come from a subscriber that has only a part
	// of a state, and would miss the rest.
	resumable uint64
	positions []uint64 // of its batches in history, the last of which has the number before next
}

// published is an encoded batch.
type published struct {
	rank uint32
	body []byte
}

// bytes returns the approximate memory of a batch, with its positions in the history.
func (p *published) bytes() int { return 64 + cap(p.body) }

// end returns the position after the last batch.
func (w *worker) end() uint64 { return w.first + uint64(len(w.history)) }

// rankBits is how many bits of a sequence number are below the rank. So a number names a batch of the worker, also to
// subscribers that have the number of one rank only.
const rankBits = 52

// position returns where a subscriber goes on that wants a sequence number next, and has all batches of the other ranks before
// it. ok is false if that is not known.
func (w *worker) position(seq uint64) (position uint64, ok bool) {
	r := w.ranks[uint32(seq>>rankBits)]
	if r == nil || seq < r.resumable {
		return 0, false
	}
	kept, back := uint64(len(r.positions)), r.next-seq // back is large for a number that is not used yet
	switch {
	case kept == 0 || back > kept:
		return 0, false
	case back == 0:
		return r.positions[kept-1] + 1, true
	}
	return r.positions[kept-back], true
}

// publish adds a batch to the history.
func (w *worker) publish(rank uint32, body []byte) {
	b := published{rank, body}
	r := w.ranks[rank]
	r.next++
	r.positions = append(r.positions, w.end())
	w.history, w.bytes = append(w.history, b), w.bytes+b.bytes()
}

// evict removes the oldest batches beyond a limit in bytes, but not the last batch.
func (w *worker) evict(limit int) {
	for ; w.bytes > limit && len(w.history) > 1; w.first++ {
		b := w.history[0]
		w.bytes -= b.bytes()
		w.history[0] = published{}
		w.history = w.history[1:]
		w.ranks[b.rank].positions = w.ranks[b.rank].positions[1:]
	}
}

const (
	minHistory    = 1 << 20 // bytes of a worker
	statesAtATime = 2       // one for an address
	// minPaceBytes is how many bytes a subscriber must read in StallTimeout, as those of snapshots of kvcast's API.
	minPaceBytes        = 8 << 20
	defaultStallTimeout = 30 * time.Second
	// stateBlocks is how many blocks a batch of a state has at least, except the last ones.
	stateBlocks = 1024
)

// most returns how many of some units an address may use: three quarters, so that a gateway can read most workers, and cannot keep others away.
func most(n int64) int64 { return n - n/4 }

// New returns a service. Its subscribers are served while Run runs.
func New(c Config, j journal.Reader, x *index.Index) *Service {
	c.StallTimeout = cmp.Or(c.StallTimeout, defaultStallTimeout)
	create := promauto.With(c.Registerer)
	s := &Service{
		cfg: c, journal: j, index: x, slots: budget.NewShares(budget.New("", int64(c.MaxSubscribers)), most(int64(c.MaxSubscribers))),
		states: budget.NewShares(budget.New("", statesAtATime), 1), memory: budget.New("egress_smg_state_bytes", c.StateBytes), workers: make(map[string]*worker), stopped: make(chan struct{}),
		metrics: metrics{
			subscribers: create.NewGauge(prometheus.GaugeOpts{Name: "kvcast_egress_smg_subscribers", Help: "Open streams of SubscribeKvEvents."}),
			states:      create.NewCounter(prometheus.CounterOpts{Name: "kvcast_egress_smg_states_total", Help: "Times that all blocks of a worker were sent to a subscriber."}),
			behind:      create.NewCounter(prometheus.CounterOpts{Name: "kvcast_egress_smg_out_of_range_total", Help: "Times that a subscriber wanted batches that are not kept."}),
			stalled:     create.NewCounter(prometheus.CounterOpts{Name: "kvcast_egress_smg_stalled_total", Help: "Streams ended because the subscriber did not read, or too slowly."}),
			omitted:     vllm.NewOmitted(c.Registerer, "kvcast_egress_smg_blocks_omitted_total"),
		},
	}
	s.shares = budget.NewShares(s.memory, most(c.StateBytes))
	s.stop = sync.OnceFunc(func() { close(s.stopped) })
	create.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvcast_egress_smg_history_bytes", Help: "Memory of batches that are kept for subscribers."},
		func() float64 { return float64(s.historyBytes()) })
	c.Registerer.MustRegister(budget.Collector{s.memory})
	return s
}

// Run publishes until ctx ends. It returns an error if the journal cannot be read. It must be called once.
func (s *Service) Run(ctx context.Context) error {
	defer s.stop()
	source := &apply.Source{Journal: s.journal, Index: s.index, Lock: &s.mu, Logger: s.cfg.Logger}
	return source.Run(ctx, target{s}, func() {
		s.mu.Lock()
		s.running = true
		s.mu.Unlock()
	})
}

// Stop ends the streams of all subscribers, and refuses further ones.
func (s *Service) Stop() { s.stop() }

// target implements apply.Target with a Service. The caller of its methods holds Service.mu.
type target struct{ *Service }

func (t target) Begin(name string, added *kvcastv1.WorkerAdded) {
	w := t.workers[name]
	if w == nil {
		w = &worker{name: name, ranks: make(map[uint32]*rankStream), began: max(vllm.TimeSeq(time.Now()), t.least), changed: make(chan struct{})}
		t.workers[name] = w
		for _, other := range t.workers { // their shares are smaller now
			other.evict(t.share())
		}
	}
	if address := host(added.GetEndpoint()); address != w.address {
		w.address = address
		t.warnShared(w)
	}
	w.clear()
	for _, rank := range added.GetRanks() {
		w.rank(rank)
	}
}

func (t target) Apply(name string, event *kvcastv1.RouterEvent) {
	t.workers[name].rank(event.GetDpRank()).Apply(event)
}

// Flush implements apply.Target: it publishes the pending events.
func (t target) Flush(name string, at float64) {
	w, grown := t.workers[name], false
	for _, rank := range slices.Sorted(maps.Keys(w.ranks)) {
		r := w.ranks[rank]
		t.metrics.omitted.Count(r.Stream)
		events := r.Take()
		if len(events) == 0 {
			continue
		}
		b := newBatch(at, rank, events, w.events+1)
		b.SequenceNumber = r.next
		w.events += uint64(len(events))
		w.publish(rank, appendBatch(nil, b))
		clear(events) // they reference entries
		grown = true
	}
	if !grown {
		return
	}
	w.evict(t.share())
	close(w.changed)
	w.changed = make(chan struct{})
}

// End implements apply.Target: it publishes that the worker has no blocks, after which its subscribers' streams end.
func (t target) End(name string) {
	w := t.workers[name]
	w.clear()
	t.Flush(name, apply.Now())
	for rank, r := range w.ranks { // the clock's millisecond may be the same when it is added again, or an earlier one
		t.least = max(t.least, r.next-uint64(rank)<<rankBits)
	}
	w.ended = true
	close(w.changed)
	delete(t.workers, name)
}

// warnShared logs that an address is that of two workers.
func (s *Service) warnShared(w *worker) {
	for name, other := range s.workers {
		if other != w && w.address != "" && other.address == w.address {
			s.cfg.Logger.Warn("two workers have one address, which names the one whose name is first: set egress.smg.workers", "address", w.address, "worker", w.name, "other", name)
			return
		}
	}
}

// host returns an address without a scheme and a path.
func host(address string) string {
	if _, rest, ok := strings.Cut(address, "://"); ok {
		address = rest
	}
	address, _, _ = strings.Cut(address, "/")
	return address
}

func (w *worker) clear() {
	for _, r := range w.ranks {
		r.Clear()
	}
}

// rank returns the stream of a rank, which begins with a clear.
func (w *worker) rank(rank uint32) *rankStream {
	if w.ranks[rank] == nil {
		r := &rankStream{Stream: vllm.NewStream(w.name, rank, "", wire.FormMap, 0), next: uint64(rank)<<rankBits | w.began}
		r.NeedTokens() // gateways compute contents from them
		w.ranks[rank] = r
	}
	return w.ranks[rank]
}

// share returns how many bytes of history each worker may have.
func (s *Service) share() int { return max(minHistory, s.cfg.HistoryBytes/len(s.workers)) }

// historyBytes returns the memory of the histories of all workers.
func (s *Service) historyBytes() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.workers {
		n += w.bytes
	}
	return n
}
