package ingest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"

	"github.com/pebbe/zmq4"
	"github.com/prometheus/client_golang/prometheus"
)

// ErrStarted is returned by a second Run, or one after Close.
var ErrStarted = errors.New("ingest was started or closed before")

// spareSockets are what a context has beside those of the sources: two for each
// reader, and what libzmq uses itself.
const spareSockets = 64

// Ingest reads the engines of a Config into a Sink.
type Ingest struct {
	config    Config
	sink      Sink
	zctx      *zmq4.Context
	roster    *roster
	board     board
	readers   []*reader
	workers   []configuredWorker
	endpoints []string
	metrics   *metrics
	registry  prometheus.Registerer
	log       *slog.Logger
	used      atomic.Bool
}

// configuredWorker is a worker that the sink has to be told of before anything
// of it is read.
type configuredWorker struct {
	desc   Worker
	worker *worker
}

// New checks the Config, binds the listeners and connects to the sources, which
// goes on in the background. Batches wait in libzmq until Run reads them. The
// Ingest must be Run or Closed.
func New(c Config, sink Sink) (*Ingest, error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("check config: %w", err)
	}
	c = c.withDefaults()
	zctx, err := zmq4.NewContext()
	if err != nil {
		return nil, fmt.Errorf("create ZeroMQ context: %w", err)
	}
	in := &Ingest{
		config:   c,
		sink:     sink,
		zctx:     zctx,
		roster:   &roster{max: c.MaxWorkers, names: make(map[string]struct{})},
		metrics:  newMetrics(),
		registry: c.Metrics,
		log:      c.Logger,
	}
	if err := in.open(); err != nil {
		return nil, errors.Join(err, in.closeReaders(), in.release())
	}
	return in, nil
}

// open makes the readers and all they read.
func (in *Ingest) open() error {
	c := in.config
	if in.registry != nil {
		if err := in.metrics.register(in.registry); err != nil {
			return err
		}
	}
	n := min(c.Readers, len(c.Workers)+len(c.Listeners))
	if err := in.zctx.SetMaxSockets(c.sockets() + 2*n + spareSockets); err != nil {
		return fmt.Errorf("raise ZeroMQ's limit of sockets: %w", err)
	}
	for i := range n {
		r, err := newReader(in.zctx, i)
		if err != nil {
			return err
		}
		in.readers = append(in.readers, r)
	}
	k := sockets{zctx: in.zctx, reconnectMin: c.ReconnectMin, reconnectMax: c.ReconnectMax}
	for _, w := range c.Workers {
		if err := in.openWorker(k, w); err != nil {
			return fmt.Errorf("open worker %s: %w", w.Name, err)
		}
	}
	for _, l := range c.Listeners {
		if l.Worker != "" {
			in.roster.reserve(l.Worker)
		}
		if err := in.openListener(k, l); err != nil {
			return fmt.Errorf("open listener: %w", err)
		}
	}
	return nil
}

func (in *Ingest) openWorker(k sockets, c WorkerConfig) error {
	in.roster.reserve(c.Name)
	desc := Worker{
		Name:      c.Name,
		Model:     c.Model,
		BlockSize: c.BlockSize,
		Endpoint:  c.Endpoint,
		Labels:    c.Labels,
		Ranks:     ranksOf(c),
	}
	w := newWorker(desc, in.metrics, in.log)
	in.workers = append(in.workers, configuredWorker{desc, w})
	r := in.idlest()
	var connects, replays []string
	for i, src := range c.Sources {
		connects = append(connects, src.Connect)
		if src.Replay != "" {
			replays = append(replays, src.Replay)
		}
		base, ok := parseEndpoint(src.Connect, false)
		if !ok {
			return fmt.Errorf("parse endpoint %q: not valid", src.Connect)
		}
		for rank := range src.DPSize {
			about := SourceStatus{Engine: src.Engine, Endpoint: base.ofRank(rank).String(), Rank: uint32(rank)}
			if replay, ok := parseEndpoint(src.Replay, false); ok {
				about.Replay = replay.ofRank(rank).String()
			}
			s, err := k.connect(about.Endpoint, src.Topic)
			if err != nil {
				return err
			}
			p := newPublisher(w, i, &in.board, about, in.metrics)
			// An endpoint alone says nothing of its rank; one of several does.
			p.rankTold = src.DPSize == 1
			r.add(s, p)
		}
	}
	w.log.Info("reading worker", "connect", strings.Join(connects, " "), "ranks", len(desc.Ranks))
	if len(replays) > 0 {
		w.log.Warn("replay endpoints are not asked in this version: lost batches are told as gaps",
			"replay", strings.Join(replays, " "))
	}
	return nil
}

func (in *Ingest) openListener(k sockets, c ListenerConfig) error {
	e, ok := parseEndpoint(c.Bind, true)
	if !ok {
		return fmt.Errorf("parse endpoint %q: not valid", c.Bind)
	}
	s, address, err := k.bind(e.String())
	if err != nil {
		return err
	}
	in.endpoints = append(in.endpoints, address)
	in.log.Info("listening", "endpoint", address)
	in.idlest().add(s, newListener(c, address, in.sink, in.roster, &in.board, in.metrics, in.log))
	return nil
}

// idlest returns the reader with the fewest sockets.
func (in *Ingest) idlest() *reader {
	least := in.readers[0]
	for _, r := range in.readers[1:] {
		if r.load() < least.load() {
			least = r
		}
	}
	return least
}

// ranksOf returns the dp ranks of a worker's sources.
func ranksOf(c WorkerConfig) []uint32 {
	most := 0
	for _, s := range c.Sources {
		most = max(most, s.DPSize)
	}
	ranks := make([]uint32, most)
	for i := range ranks {
		ranks[i] = uint32(i)
	}
	return ranks
}

// Endpoints returns the addresses of the listeners, in their order, with the
// ports that were chosen for those left open.
func (in *Ingest) Endpoints() []string {
	return append([]string(nil), in.endpoints...)
}

// Run reads until ctx is done, and then returns nil once everything is closed:
// no call of the Sink or a Lane is under way or will follow. It waits for a
// Lane's call that blocks. It returns an error where ZeroMQ fails, and ErrStarted
// if it ran before.
func (in *Ingest) Run(ctx context.Context) error {
	if !in.used.CompareAndSwap(false, true) {
		return ErrStarted
	}
	for _, w := range in.workers {
		w.worker.lane = in.sink.AddWorker(w.desc)
	}
	done := make(chan error, len(in.readers))
	for _, r := range in.readers {
		go func() { done <- r.run() }()
	}
	var errs []error
	waiting := len(in.readers)
	select {
	case <-ctx.Done():
	case err := <-done:
		// A reader ends by itself only if it fails.
		errs = append(errs, err)
		waiting--
	}
	for _, r := range in.readers {
		errs = append(errs, r.stop())
	}
	for range waiting {
		errs = append(errs, <-done)
	}
	return errors.Join(append(errs, in.release())...)
}

// Close gives back what New took, for an Ingest that will not Run. Otherwise it
// does nothing: Run closes everything itself.
func (in *Ingest) Close() error {
	if !in.used.CompareAndSwap(false, true) {
		return nil
	}
	return errors.Join(in.closeReaders(), in.release())
}

func (in *Ingest) closeReaders() error {
	var errs []error
	for _, r := range in.readers {
		errs = append(errs, r.close())
	}
	return errors.Join(errs...)
}

// release ends what the readers leave behind. They have closed their sockets.
func (in *Ingest) release() error {
	var errs []error
	for _, r := range in.readers {
		errs = append(errs, r.wake.Close())
	}
	errs = append(errs, in.zctx.Term())
	if in.registry != nil {
		in.metrics.unregister(in.registry)
	}
	return errors.Join(errs...)
}
