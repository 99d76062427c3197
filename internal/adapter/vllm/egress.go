// Package vllm publishes the events of all workers over ZeroMQ as vLLM does, for routers that read engines.
//
// In: the entries of a journal, and the index that has applied them. Out: for each dp rank the batches of an engine, at
// endpoints that consumers connect to, or at consumers that kvcast connects to. Guarantee: a consumer that has applied all
// batches holds the blocks of the index, except those that Omission describes. It begins with all blocks: those in the
// answer to a replay request, or those that follow its subscription at an endpoint without a replay socket. Each consumer
// reads a bounded history at its own pace; one that is too slow begins anew, and costs nobody else anything.
//
// Stream, History and Consumer are state machines without I/O. Egress applies entries to streams, and endpoints and conns do
// the I/O.
package vllm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/internal/adapter/apply"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Config configures an Egress.
type Config struct {
	// Endpoints are where batches are published.
	Endpoints []EndpointConfig
	// Topic is the topic of batches, in which {worker}, {endpoint}, {rank_endpoint}, {model} and {rank} are replaced. An endpoint that is
	// unknown is the worker's name. That of a rank has the endpoint's port and the number of the rank, counted from the first rank with which the
	// worker was added. It may be empty if each endpoint has one worker.
	Topic string
	// FirstSeq is the first seq of each dp rank.
	FirstSeq uint64
	// ArrayEvents encodes each event as an array of its fields, as vLLM did before 0.26, and not as a map.
	ArrayEvents bool
	// HistoryBatches bounds the batches of an endpoint that are kept, and HistoryBytes those of all endpoints together.
	HistoryBatches, HistoryBytes int
	// StateBytes bounds the memory of states of streams that are being sent to consumers.
	StateBytes int64
	// MaxConsumers bounds the connections of consumers.
	MaxConsumers int
	// Lookup resolves a name of consumers; nil means net.DefaultResolver.LookupNetIP.
	Lookup     func(ctx context.Context, network, host string) ([]netip.Addr, error)
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// Egress publishes the events of all workers. New opens its ports.
type Egress struct {
	cfg     Config
	journal journal.Reader
	index   *index.Index
	metrics *metrics
	memory  *budget.Budget // of states
	// The states that are being built, the bytes of memory, and the connections of consumers. An address has a part of each, so that
	// others are served while it uses that up.
	states, stateBytes, connections *budget.Shares

	logger *slog.Logger

	mu        sync.Mutex // guards all below, the endpoints' histories and streams, and all consumers
	endpoints []*endpoint
	workers   map[string]*worker
	oneTopic  bool                 // ranks of a worker share a topic, which was logged
	seqs      map[streamKey]uint64 // the next seqs of streams that have ended
}

// worker is the streams of a worker.
type worker struct {
	name, model, address string
	firstRank            uint32
	streams              map[uint32]*Stream
	unpublished          bool // ranks have no publisher, which was logged
}

type streamKey struct {
	worker string
	rank   uint32
}

const (
	// maxSeqs bounds Egress.seqs. Beyond it, streams that begin again may begin with lower seqs, as after a restart.
	maxSeqs = 1 << 16
	// statesAtATime is how many states are built at a time, one of each address. Each copies a rank's blocks, as snapshots do.
	statesAtATime = 2
	minHistory    = 1 << 20 // bytes of each endpoint's history
)

// New opens the ports of an egress. The caller runs it with Run, or closes it with Close.
func New(ctx context.Context, c Config, j journal.Reader, x *index.Index) (*Egress, error) {
	e := &Egress{
		cfg: c, journal: j, index: x, logger: c.Logger,
		memory:      budget.New("egress_state_bytes", c.StateBytes),
		states:      budget.NewShares(budget.New("egress_states", statesAtATime), 1),
		connections: budget.NewShares(budget.New("egress_connections", int64(c.MaxConsumers)), int64(max(1, c.MaxConsumers/8))),
		workers:     make(map[string]*worker), seqs: make(map[streamKey]uint64),
	}
	if e.cfg.Lookup == nil {
		e.cfg.Lookup = net.DefaultResolver.LookupNetIP
	}
	e.stateBytes = budget.NewShares(e.memory, c.StateBytes/2)
	e.metrics = newMetrics(e, c.Registerer)
	for _, ec := range c.Endpoints {
		p, err := e.open(ctx, ec, max(minHistory, c.HistoryBytes/len(c.Endpoints)))
		if err != nil {
			return nil, errors.Join(err, e.Close())
		}
		e.endpoints = append(e.endpoints, p)
	}
	return e, nil
}

// TimeSeq returns a first seq that is larger than all seqs of an egress that began in an earlier millisecond, unless that has
// published more than a million batches of a dp rank a second. Consumers then see a restart of kvcast as batches that they
// have missed, and get all blocks. From 0, a restart could be hidden: a consumer that connects again after more batches than
// it had before would request those that follow, from another history.
func TimeSeq(start time.Time) uint64 { return uint64(start.UnixMilli()) << 10 }

// Bound describes the open ports, in the order of Config.Endpoints.
func (e *Egress) Bound() (all []EndpointConfig) {
	for _, p := range e.endpoints {
		c := p.cfg
		for l, to := range map[net.Listener]*string{p.pub: &c.Bind, p.replay: &c.Replay} {
			if l != nil && l.Addr().Network() == "tcp" {
				*to = "tcp://" + l.Addr().String()
			}
		}
		all = append(all, c)
	}
	return all
}

// Close closes the ports of an egress that does not run.
func (e *Egress) Close() error {
	var errs []error
	for _, p := range e.endpoints {
		errs = append(errs, p.close())
	}
	return errors.Join(errs...)
}

// Run publishes until ctx ends. It returns an error if the journal cannot be read.
func (e *Egress) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	return e.source().Run(ctx, target{e}, func() {
		for _, p := range e.endpoints {
			running.Go(func() { p.run(ctx) })
		}
	})
}

func (e *Egress) source() *apply.Source {
	return &apply.Source{Journal: e.journal, Index: e.index, Lock: &e.mu, Logger: e.logger, Restarted: e.metrics.restarts.Inc}
}

// target implements apply.Target with an Egress. The caller of its methods holds Egress.mu.
type target struct{ *Egress }

// Begin implements apply.Target. If the model or the address has changed, the worker's streams end, since they have other topics.
func (t target) Begin(name string, added *kvcastv1.WorkerAdded) {
	w := t.workers[name]
	if w != nil && (w.model != added.GetModel() || w.address != added.GetEndpoint()) {
		t.End(name)
		w = nil
	}
	if w == nil {
		w = &worker{name: name, model: added.GetModel(), address: added.GetEndpoint(), streams: make(map[uint32]*Stream)}
		if ranks := added.GetRanks(); len(ranks) > 0 {
			w.firstRank = slices.Min(ranks)
		}
		t.workers[name] = w
	}
	for _, s := range w.streams {
		s.Clear()
	}
	for _, rank := range added.GetRanks() {
		t.stream(w, rank)
	}
}

func (t target) Apply(name string, event *kvcastv1.RouterEvent) {
	t.stream(t.workers[name], event.GetDpRank()).Apply(event)
}

func (t target) Flush(name string, at float64) { t.publish(t.workers[name], at, false) }

// End implements apply.Target: it publishes that the worker has no blocks, and ends its streams.
func (t target) End(name string) {
	w := t.workers[name]
	for _, s := range w.streams {
		s.Clear()
	}
	t.publish(w, apply.Now(), true)
	for _, s := range w.streams {
		if len(t.seqs) >= maxSeqs {
			clear(t.seqs)
		}
		t.seqs[streamKey{w.name, s.rank}] = s.Next()
		for _, p := range t.endpoints {
			p.end(s)
		}
	}
	delete(t.workers, w.name)
}

// stream returns the stream of a rank, and begins it if it does not exist.
func (e *Egress) stream(w *worker, rank uint32) *Stream {
	s := w.streams[rank]
	if s != nil {
		return s
	}
	key := streamKey{w.name, rank}
	first, ok := e.seqs[key]
	if !ok {
		first = e.cfg.FirstSeq
	}
	delete(e.seqs, key)
	form := wire.FormMap
	if e.cfg.ArrayEvents {
		form = wire.FormArray
	}
	s = NewStream(w.name, rank, topic(e.cfg.Topic, w, rank), form, first)
	w.streams[rank] = s
	for _, p := range e.endpoints {
		p.begin(s)
	}
	e.checkRank(w, rank)
	return s
}

// topic returns the topic of a rank.
func topic(pattern string, w *worker, rank uint32) string {
	address := w.address
	if address == "" {
		address = w.name
	}
	return strings.NewReplacer("{worker}", w.name, "{endpoint}", address, "{rank_endpoint}", rankAddress(address, rank, w.firstRank),
		"{model}", w.model, "{rank}", fmt.Sprint(rank)).Replace(pattern)
}

// rankAddress returns the address for requests to a rank. An address without a port is that of all ranks.
func rankAddress(address string, rank, first uint32) string {
	colon := strings.LastIndexByte(address, ':')
	port, err := strconv.ParseUint(address[colon+1:], 10, 16)
	if colon < 0 || err != nil || rank < first {
		return address
	}
	return address[:colon+1] + strconv.FormatUint(port+uint64(rank-first), 10)
}

// publish publishes the pending events of a worker. If last is set, the worker's streams end.
func (e *Egress) publish(w *worker, at float64, last bool) {
	for _, s := range w.streams {
		e.metrics.omitted.Count(s)
		if s.Empty() {
			continue
		}
		payload, seq := s.Batch(at)
		e.metrics.batches.Inc()
		for _, p := range e.endpoints {
			p.publish(Batch{Stream: s, Seq: seq, Payload: payload, Last: last})
		}
	}
}
