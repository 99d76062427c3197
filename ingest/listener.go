package ingest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/transport"
)

// listener reads a bound socket, which engines connect to. The topic identifies a worker, and the topic with the dp rank in a batch a
// publisher. Topics are validated, and their number is bounded, because any peer can send them.
//
// A malformed batch has no rank. It is counted for the worker and not passed to a publisher, because the batch of that seq would look like
// a restart to the publisher of another rank. Its own publisher notices the missing seq with the next batch.
type listener struct {
	shared   *shared
	config   config.Listener
	address  string
	local    bool // reports whether it is bound to ipc
	receiver transport.Listener
	requests sync.WaitGroup // goroutines of the workers
	patterns []string       // patterns of topics, for matchTopic
	hosts    config.Hosts   // hosts that may be asked for replays
	log      *slog.Logger

	mu sync.Mutex // guards the fields below; locked before a worker's mutex
	// topics are the accepted topics, without their epochs.
	topics  map[string]*boundTopic
	workers map[string]*boundWorker
	peers   peers
	// spawnIn makes a new worker's goroutines end before the listener's run returns.
	spawnIn func(*worker)
}

// boundTopic has the publishers of one topic: the dp ranks of one pod.
type boundTopic struct {
	worker *boundWorker
	source int
	name   string
	// host is the host in the topic; empty if it has none.
	host  string
	ranks map[uint32]*publisher
}

// boundWorker is a worker of a listener. It has at most feed.MaxRanks publishers.
type boundWorker struct {
	*worker
	topics int // number of its topics; the next topic's source
	// cancelClaim ends a call of Config.Claim; nil before the first. The listener's mutex guards it.
	cancelClaim context.CancelFunc
}

// newListener binds a listener.
func newListener(s *shared, c config.Listener) (*listener, error) {
	e, ok := config.ParseEndpoint(c.Bind, true)
	if !ok {
		return nil, fmt.Errorf("parse endpoint %q: want %s", c.Bind, config.AllowedBind)
	}
	hosts, err := config.ParseHosts(c.ReplayHosts)
	if err != nil {
		return nil, fmt.Errorf("parse replay hosts: %w", err)
	}
	receiver, address, err := s.transports.Listening.Bind(e.String(), s.metrics.listeners.onDrop)
	if err != nil {
		return nil, err
	}
	l := &listener{
		shared:   s,
		config:   c,
		address:  address,
		local:    e.Transport == config.TransportIPC,
		receiver: receiver,
		hosts:    hosts,
		log:      s.config.Logger.With("bind", c.Bind),
		topics:   make(map[string]*boundTopic),
		workers:  make(map[string]*boundWorker),
		peers:    newPeers(),
	}
	for _, p := range c.Topics {
		l.patterns = append(l.patterns, slashless(p))
	}
	return l, nil
}

// start adds recovered workers to the stream. run is called next, with the same context.
func (l *listener) start(ctx context.Context) {
	l.spawnIn = func(w *worker) { w.spawnIn(ctx, &l.requests) }
	l.adopt()
}

// run reads until ctx is done, and closes the socket.
func (l *listener) run(ctx context.Context) error {
	defer l.requests.Wait()
	stop := context.AfterFunc(ctx, l.receiver.Interrupt)
	defer stop()
	err := l.read(ctx)
	if ctx.Err() != nil {
		err = nil
	}
	l.close()
	return errors.Join(err, l.receiver.Close())
}

func (l *listener) read(ctx context.Context) error {
	for ctx.Err() == nil {
		c, err := l.receiver.Next(func() time.Time { return time.Time{} })
		if err != nil {
			return fmt.Errorf("read %s: %w", l.address, err)
		}
		l.process(ctx, c)
		l.receiver.Recycle(c)
	}
	return nil
}

// handleEvent handles a connection event.
func (l *listener) handleEvent(e transport.Event) {
	switch e.Kind {
	case transport.Connected:
		l.peers.open(e.Conn)
		l.shared.metrics.listeners.inc(connectionsTotal)
	case transport.Disconnected:
		l.shared.metrics.listeners.inc(disconnectionsTotal)
		l.peers.close(e.Conn)
	default:
	}
}

// process handles the events and messages of a chunk.
func (l *listener) process(ctx context.Context, c *transport.Chunk) {
	in := l.shared.intake(nil)
	defer l.shared.recycle(in)
	began := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	n := c.Each(l.handleEvent, func(m transport.Message) { l.message(ctx, in, began, m) })
	if c.Drops != nil {
		l.overrun(c.Drops, began)
	}
	l.shared.metrics.listeners.add(messagesTotal, uint64(n))
	l.shared.metrics.observe(began, n)
}

// overrun reports an overrun to the publishers whose messages may have been dropped.
func (l *listener) overrun(d *transport.Drops, now time.Time) {
	for topic, t := range l.topics {
		t.worker.mu.Lock()
		for _, p := range t.ranks {
			current, other := p.machine.Connections()
			if t.worker.lane != nil && d.MayInclude(topic, l.peers.number(current), l.peers.number(other)) {
				p.apply(now, p.machine.Overrun(now))
			}
		}
		t.worker.mu.Unlock()
	}
}

// peer returns the connection of a message; nil if it is closed. The first message sets the peer's
// address.
func (l *listener) peer(m transport.Message) *peer {
	c := l.peers.byConn[m.Conn]
	if c != nil && !c.address.IsValid() {
		c.address = l.peerAddress(m)
	}
	return c
}

// peerAddress returns the address of a message's peer, whose connection may be closed; invalid if it is unknown. Peers over ipc are on this host.
func (l *listener) peerAddress(m transport.Message) netip.Addr {
	if l.local {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	return m.Peer
}

func (l *listener) message(ctx context.Context, in *intake, now time.Time, m transport.Message) {
	why, ok := in.open(m)
	if !ok {
		l.refuse(why, l.peerAddress(m), m.Frames[0])
		return
	}
	t := l.topics[string(in.topic)]
	entered := t != nil && t.worker.hasEntered()
	if !entered {
		in.load()
		in.release() // until the worker is locked
	}
	if t == nil {
		// A malformed batch creates no worker.
		if in.err != nil {
			l.shared.metrics.listeners.incLabeled(rejectedTotal, errorName(in.err))
			return
		}
		from := l.peerAddress(m)
		if l.shared.budgets.sources.Full() {
			l.refuse(refusedSources, from, in.topic)
			return
		}
		if l.shared.addresses.Full(budget.AddressOf(from)) {
			l.refuse(refusedAddress, from, in.topic)
			return
		}
		if t, why, ok = l.accept(in.topic, from); !ok {
			l.refuse(why, from, in.topic)
			return
		}
	}
	if !entered && in.err == nil && !t.worker.hasEntered() {
		if t, ok = l.admitWorker(ctx, t); !ok {
			return
		}
	}
	topic := string(in.topic)
	if !l.deliver(in, now, t, m) && len(t.ranks) == 0 {
		l.dropTopic(topic, t.worker)
	}
}

// deliver passes the intake's batch to its publisher. It returns false if that publisher is refused.
func (l *listener) deliver(in *intake, now time.Time, t *boundTopic, m transport.Message) bool {
	w := t.worker
	w.mu.Lock()
	defer w.mu.Unlock()
	in.slot = &w.decode
	defer func() {
		in.release()
		in.slot = &in.own
	}()
	in.load()
	if in.err != nil {
		w.reject(in, "seq", in.arrival.Seq)
		return true
	}
	var rank uint32
	if in.batch.HasRank {
		rank = in.batch.Rank
	}
	p := t.ranks[rank]
	if p == nil {
		var why refusal
		var ok bool
		if p, why, ok = l.addPublisher(t, rank, l.peerAddress(m)); !ok {
			w.refuse(why)
			return false
		}
	}
	w.enter()
	l.peers.arrive(p, l.peer(m), in, now)
	return true
}
