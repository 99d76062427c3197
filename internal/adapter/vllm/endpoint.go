package vllm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/internal/zmtp/outbound"
)

// EndpointConfig is where batches are published. Exactly one of Bind and Connect is set.
type EndpointConfig struct {
	// Bind is the endpoint of a PUB socket that consumers connect to, and Connect that of a SUB socket that a consumer has
	// bound. A name in Connect has a consumer at each of its addresses.
	Bind, Connect string
	// Replay is the endpoint of a ROUTER socket that answers replay requests; empty: none. It needs Worker.
	Replay string
	// Worker and Rank are the only dp rank that is published. Empty: all ranks of all workers.
	Worker string
	Rank   uint32
}

// endpoint is where batches are published, with those that were published last. Egress.mu guards the fields from history on.
type endpoint struct {
	*Egress
	cfg           EndpointConfig
	pub, replay   net.Listener // nil: none
	network, addr string       // to connect to

	history *History
	streams []Published
	version uint64 // changes with streams
	conns   map[*conn]struct{}
}

// open opens an endpoint's ports.
func (e *Egress) open(ctx context.Context, c EndpointConfig, historyBytes int) (*endpoint, error) {
	p := &endpoint{Egress: e, cfg: c, history: NewHistory(e.cfg.HistoryBatches, historyBytes), conns: make(map[*conn]struct{})}
	if c.Connect != "" {
		at, ok := ingestconfig.ParseEndpoint(c.Connect, false)
		if !ok {
			return nil, fmt.Errorf("connect to %q: want tcp://HOST:PORT or ipc://PATH", c.Connect)
		}
		p.network, p.addr = at.Net()
		return p, nil
	}
	var err error
	if p.pub, err = bind(ctx, c.Bind); err == nil && c.Replay != "" {
		p.replay, err = bind(ctx, c.Replay)
	}
	if err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}

func bind(ctx context.Context, endpoint string) (net.Listener, error) {
	at, ok := ingestconfig.ParseEndpoint(endpoint, true)
	if !ok {
		return nil, fmt.Errorf("bind %q: want %s", endpoint, ingestconfig.AllowedBind)
	}
	network, addr := at.Net()
	if network == "unix" {
		if err := ingestconfig.RemoveSocket(addr); err != nil {
			return nil, fmt.Errorf("bind %s: %w", endpoint, err)
		}
	}
	l, err := new(net.ListenConfig).Listen(ctx, network, addr)
	if err != nil {
		return nil, fmt.Errorf("bind %s: %w; choose another endpoint under egress.zmq", endpoint, err)
	}
	return l, nil
}

func (p *endpoint) close() error {
	var errs []error
	for _, l := range []net.Listener{p.pub, p.replay} {
		if l != nil {
			errs = append(errs, l.Close())
		}
	}
	return errors.Join(errs...)
}

// sendsStates reports whether a subscription is followed by all blocks. Otherwise, consumers request them.
func (p *endpoint) sendsStates() bool { return p.replay == nil }

// begin adds a stream, if the endpoint publishes it. The caller of begin, end and publish holds Egress.mu.
func (p *endpoint) begin(s *Stream) {
	if p.cfg.Worker != "" && (p.cfg.Worker != s.worker || p.cfg.Rank != s.rank) {
		return
	}
	p.streams = append(p.streams, Published{s, p.history.End()})
	p.version++
}

// checkRank logs once if no publisher of a worker has a rank, and if consumers of all workers cannot tell the ranks of one from each
// other. The caller holds Egress.mu.
func (e *Egress) checkRank(w *worker, rank uint32) {
	all, own, published := false, false, false // endpoints of all workers, of the worker, of the rank
	for _, p := range e.endpoints {
		all = all || p.cfg.Worker == ""
		own = own || p.cfg.Worker == w.name
		published = published || p.cfg.Worker == w.name && p.cfg.Rank == rank
	}
	if own && !published && !w.unpublished {
		w.unpublished = true
		e.logger.Warn("worker has more dp ranks than its publisher, which does not publish the others; set first_rank and dp_size under egress.zmq.publishers",
			"worker", w.name, "rank", rank)
	}
	for other, s := range w.streams {
		if all && other != rank && s.topic == w.streams[rank].topic && !e.oneTopic {
			e.oneTopic = true
			e.logger.Warn("dp ranks of a worker have one topic, so that consumers mix up their seqs and blocks; put {rank} or {rank_endpoint} into egress.zmq.topic",
				"worker", w.name, "topic", e.cfg.Topic)
		}
	}
}

func (p *endpoint) end(s *Stream) {
	if i := p.find(s); i >= 0 {
		p.streams = slices.Delete(p.streams, i, i+1)
		p.version++
	}
	for c := range p.conns {
		c.signal()
	}
}

func (p *endpoint) find(s *Stream) int {
	return slices.IndexFunc(p.streams, func(o Published) bool { return o.Stream == s })
}

func (p *endpoint) publish(b Batch) {
	if p.find(b.Stream) < 0 {
		return
	}
	p.history.Append(b)
	for c := range p.conns {
		if !c.consumer.Skip(p.history, b.Stream, p.version) {
			c.signal()
		}
	}
}

// run serves consumers until ctx ends.
func (p *endpoint) run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	if p.cfg.Connect != "" {
		p.connectAll(ctx)
		return
	}
	if p.replay != nil {
		running.Go(func() { p.accept(ctx, p.replay, zmtp.ROUTER) })
	}
	p.accept(ctx, p.pub, zmtp.PUB)
}

func (p *endpoint) accept(ctx context.Context, l net.Listener, kind zmtp.SocketType) {
	outbound.Accept(ctx, l, func(c net.Conn) { p.admit(ctx, c, kind) })
}

// admit serves a connection within the limits.
func (p *endpoint) admit(ctx context.Context, c net.Conn, kind zmtp.SocketType) {
	from := budget.PeerOf(c.RemoteAddr())
	if err := p.connections.Reserve(from, 1); err != nil {
		p.metrics.refused.Inc()
		_ = c.Close()
		p.logger.Warn("connection of a consumer was refused; raise egress.zmq.max_consumers, of which an address may use an eighth",
			"peer.address", c.RemoteAddr().String(), "reason", err)
		return
	}
	defer p.connections.Release(from, 1)
	p.serve(ctx, c, kind)
}
