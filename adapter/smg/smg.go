// Package smg publishes the events of workers as engines of SMG do, by SubscribeKvEvents, for gateways that read engines by gRPC.
//
// In: the entries of a journal, and the index that has applied them. Out: for each subscriber the events of the worker that the
// call's authority names. Guarantee: a subscriber that has applied all batches holds the blocks of the index, except those that
// vllm.Omission describes. Sequence numbers of a worker are above 0 and contiguous. Each subscriber reads a bounded history at
// its own pace; one that falls behind it is told so, and one that reads nothing is disconnected. Others are not delayed.
package smg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/adapter/vllm"
	"github.com/kvcast/kvcast/index"
	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/journal"
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
	journal vllm.Journal
	index   *index.Index
	slots   *semaphore.Weighted // subscribers
	states  *semaphore.Weighted // states that are being built
	memory  *budget.Budget      // of states
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
	after         uint64 // the last entry that the streams include
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
	statesAtATime = 2
	// minPaceBytes is how many bytes a subscriber must read in StallTimeout, as those of snapshots of kvcast's API.
	minPaceBytes        = 8 << 20
	defaultStallTimeout = 30 * time.Second
	// stateBlocks is how many blocks a batch of a state has at least, except the last ones.
	stateBlocks = 1024
)

// New returns a service. Its subscribers are served while Run runs.
func New(c Config, j vllm.Journal, x *index.Index) *Service {
	c.StallTimeout = cmp.Or(c.StallTimeout, defaultStallTimeout)
	create := promauto.With(c.Registerer)
	s := &Service{
		cfg: c, journal: j, index: x, slots: semaphore.NewWeighted(int64(c.MaxSubscribers)), states: semaphore.NewWeighted(statesAtATime),
		memory: budget.New("egress_smg_state_bytes", c.StateBytes), workers: make(map[string]*worker), stopped: make(chan struct{}),
		metrics: metrics{
			subscribers: create.NewGauge(prometheus.GaugeOpts{Name: "kvcast_egress_smg_subscribers", Help: "Open streams of SubscribeKvEvents."}),
			states:      create.NewCounter(prometheus.CounterOpts{Name: "kvcast_egress_smg_states_total", Help: "Times that all blocks of a worker were sent to a subscriber."}),
			behind:      create.NewCounter(prometheus.CounterOpts{Name: "kvcast_egress_smg_out_of_range_total", Help: "Times that a subscriber wanted batches that are not kept."}),
			stalled:     create.NewCounter(prometheus.CounterOpts{Name: "kvcast_egress_smg_stalled_total", Help: "Streams ended because the subscriber did not read, or too slowly."}),
			omitted:     vllm.NewOmitted(c.Registerer, "kvcast_egress_smg_blocks_omitted_total"),
		},
	}
	s.stop = sync.OnceFunc(func() { close(s.stopped) })
	create.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvcast_egress_smg_history_bytes", Help: "Memory of batches that are kept for subscribers."},
		func() float64 { return float64(s.historyBytes()) })
	c.Registerer.MustRegister(budget.Collector{s.memory})
	return s
}

// Run publishes until ctx ends. It returns an error if the journal cannot be read. It must be called once.
func (s *Service) Run(ctx context.Context) error {
	defer s.stop()
	after := s.begin(ctx)
	s.mu.Lock()
	s.running = true
	s.mu.Unlock()
	for ctx.Err() == nil {
		changed := s.journal.Changed()
		entries, next, err := vllm.ReadEntries(ctx, s.journal, after)
		for _, e := range entries {
			s.apply(e)
		}
		switch {
		case ctx.Err() != nil, errors.Is(err, journal.ErrClosed): // a shutdown may close the journal first
			return nil
		case errors.Is(err, journal.ErrCompacted):
			s.cfg.Logger.Warn("egress was slower than the journal's retention, and publishes all blocks anew", "position", after)
			next = s.begin(ctx)
		case err != nil:
			return fmt.Errorf("read the journal for egress: %w", err)
		case next == after:
			select {
			case <-changed:
			case <-ctx.Done():
			}
		}
		after = next
	}
	return nil
}

// Stop ends the streams of all subscribers, and refuses further ones.
func (s *Service) Stop() { s.stop() }

// begin publishes the present blocks of all workers, and returns the position after which their entries follow.
func (s *Service) begin(ctx context.Context) (after uint64) {
	after = s.journal.Bounds().Newest
	present, _ := s.index.Workers(nil)
	s.mu.Lock()
	for _, w := range s.workers {
		if !slices.ContainsFunc(present, func(p index.Worker) bool { return p.Name == w.name }) {
			s.end(w)
		}
	}
	s.mu.Unlock()
	for i := range present {
		if err := s.beginWorker(ctx, present[i].Name); err != nil && ctx.Err() == nil {
			s.cfg.Logger.Error("blocks of the index cannot be decoded", "worker", present[i].Name, "error", err)
		}
	}
	return after
}

func (s *Service) beginWorker(ctx context.Context, name string) error {
	snapshot, ok := s.index.Snapshot(name)
	if !ok {
		return nil
	}
	snapshot.TokenIDs = true
	added := snapshot.Worker.GetAdded()
	s.mu.Lock()
	w := s.describe(name, added)
	w.after = snapshot.Seq
	w.clear()
	for _, rank := range added.GetRanks() {
		w.rank(rank)
	}
	s.flush(w, now())
	s.mu.Unlock()
	for _, rank := range added.GetRanks() {
		err := eachBlocks(ctx, snapshot, rank, func(events []*kvcastv1.RouterEvent) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			for _, e := range events {
				w.rank(rank).Apply(e)
			}
			s.flush(w, now())
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// eachBlocks calls a function with the blocks of a rank, piece by piece.
func eachBlocks(ctx context.Context, snapshot index.Snapshot, rank uint32, do func([]*kvcastv1.RouterEvent) error) error {
	for piece := range snapshot.RankBlocks(ctx, rank, allTiers) {
		blocks := new(kvcastv1.SnapshotBlocks)
		if err := proto.Unmarshal(piece, blocks); err != nil {
			return err
		}
		snapshot.Reuse(piece)
		if err := do(blocks.GetEvents()); err != nil {
			return err
		}
	}
	return status.FromContextError(ctx.Err()).Err()
}

// allTiers selects the blocks of all tiers.
const allTiers = journal.Tiers(1<<(index.NumTiers+1) - 1)

func now() float64 { return float64(time.Now().UnixMicro()) / 1e6 }

// apply publishes an entry.
func (s *Service) apply(entry *kvcastv1.Entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.workers[entry.GetWorker()]
	if w != nil && entry.GetSeq() <= w.after {
		return
	}
	for _, event := range entry.GetEvents() {
		switch kind := event.GetEvent().(type) {
		case *kvcastv1.RouterEvent_WorkerAdded:
			w = s.describe(entry.GetWorker(), kind.WorkerAdded)
			w.clear()
			for _, rank := range kind.WorkerAdded.GetRanks() {
				w.rank(rank)
			}
		case *kvcastv1.RouterEvent_WorkerRemoved:
			if w != nil {
				s.end(w)
				w = nil
			}
		default:
			if w == nil {
				w = s.describe(entry.GetWorker(), new(kvcastv1.WorkerAdded))
			}
			w.rank(event.GetDpRank()).Apply(event)
		}
	}
	at := float64(entry.GetEngineTimeUnixNano()) / 1e9
	if at <= 0 {
		at = now()
	}
	if w != nil {
		s.flush(w, at)
	}
}

// describe returns a worker with its address. The caller of describe, end and flush holds the lock.
func (s *Service) describe(name string, added *kvcastv1.WorkerAdded) *worker {
	w := s.workers[name]
	if w == nil {
		w = &worker{name: name, ranks: make(map[uint32]*rankStream), began: max(vllm.TimeSeq(time.Now()), s.least), changed: make(chan struct{})}
		s.workers[name] = w
		for _, other := range s.workers { // their shares are smaller now
			other.evict(s.share())
		}
	}
	if address := host(added.GetEndpoint()); address != w.address {
		w.address = address
		s.warnShared(w)
	}
	return w
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

// end publishes that a worker has no blocks, after which its subscribers' streams end.
func (s *Service) end(w *worker) {
	w.clear()
	s.flush(w, now())
	for rank, r := range w.ranks { // the clock's millisecond may be the same when it is added again, or an earlier one
		s.least = max(s.least, r.next-uint64(rank)<<rankBits)
	}
	w.ended = true
	close(w.changed)
	delete(s.workers, w.name)
}

// flush publishes the pending events of a worker.
func (s *Service) flush(w *worker, at float64) {
	grown := false
	for _, rank := range slices.Sorted(maps.Keys(w.ranks)) {
		r := w.ranks[rank]
		s.metrics.omitted.Count(r.Stream)
		events := r.Take()
		if len(events) == 0 {
			continue
		}
		b := appendSeq(appendBatch(nil, at, rank, events, w.events+1), r.next)
		w.events += uint64(len(events))
		clear(events) // they reference entries
		w.publish(rank, b)
		grown = true
	}
	if !grown {
		return
	}
	w.evict(s.share())
	close(w.changed)
	w.changed = make(chan struct{})
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
