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
	"github.com/kvcast/kvcast/ingest/sequence"
	"github.com/kvcast/kvcast/ingest/transport"
)

// listener reads a bound socket. A publisher is identified by its topic and the dp rank of
// its batches, a worker by the topic. Names come from the network: they are validated, and
// their number is bounded.
//
// A malformed batch has no rank. It is counted for the worker and given to no publisher,
// which notices the missing seq with the next batch. Given to the wrong rank, it would make
// that rank's own batch of the same seq look like a restart.
type listener struct {
	shared   *shared
	config   config.Listener
	address  string
	local    bool // bound to ipc
	conn     *transport.Conn
	inbox    *transport.Inbox
	patterns []string     // of topics, for matchTopic
	hosts    config.Hosts // hosts that replays may be requested from
	log      *slog.Logger

	mu sync.Mutex // guards all below; a worker's mu comes after it
	// topics are those that were accepted, by their part before the NUL.
	topics     map[string]*boundTopic
	workers    map[string]*boundWorker
	peers      peers
	logLimiter logLimiter
	// spawnIn ties the goroutines of a new worker to the listener.
	spawnIn func(*worker)
}

// boundTopic is the publishers of one topic: the dp ranks of one pod.
type boundTopic struct {
	worker *boundWorker
	source int
	// host is the one that the topic names; empty where it names none.
	host  string
	ranks map[uint32]*publisher
}

// boundWorker is a worker of a listener.
type boundWorker struct {
	*worker
	model string
	// topics and publishers are counts; there are feed.MaxRanks publishers at most.
	topics     int
	publishers int
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
	conn, address, err := s.sockets.Bind(e.String())
	if err != nil {
		return nil, err
	}
	l := &listener{
		shared:  s,
		config:  c,
		address: address,
		local:   e.Transport == config.TransportIPC,
		conn:    conn,
		hosts:   hosts,
		log:     s.log.With("bind", c.Bind),
		topics:  make(map[string]*boundTopic),
		workers: make(map[string]*boundWorker),
		peers:   newPeers(),
	}
	inbox := s.inbox("")
	inbox.PerConnection = true
	l.inbox = transport.NewInbox(conn, inbox)
	for _, p := range c.Topics {
		l.patterns = append(l.patterns, slashless(p))
	}
	return l, nil
}

// run reads until ctx is done, and closes the socket.
func (l *listener) run(ctx context.Context) error {
	var requests sync.WaitGroup
	defer requests.Wait()
	l.spawnIn = func(w *worker) { w.spawnIn(ctx, &requests) }
	stop := context.AfterFunc(ctx, func() {
		l.conn.Socket.Interrupt()
		l.conn.Monitor.Interrupt()
	})
	defer stop()
	watched := make(chan error, 1)
	go func() { watched <- l.watch() }()
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		l.inbox.Drain()
	}()
	err := l.read(ctx)
	l.conn.Socket.Interrupt()
	l.conn.Monitor.Interrupt()
	<-drained
	err = errors.Join(err, <-watched)
	if ctx.Err() != nil {
		err = nil
	}
	l.inbox.Discard()
	l.close()
	return errors.Join(err, l.conn.Close())
}

func (l *listener) read(ctx context.Context) error {
	for ctx.Err() == nil {
		p, err := l.inbox.Next(func() time.Time { return time.Time{} })
		if err != nil {
			return fmt.Errorf("read %s: %w", l.address, err)
		}
		l.process(p)
		l.inbox.Recycle(p)
	}
	return nil
}

// watch adds the events of connections to the inbox while no messages arrive.
func (l *listener) watch() error {
	for {
		if err := l.conn.Monitor.Wait(); err != nil {
			return err
		}
		l.inbox.AddEvents()
	}
}

// event handles an event of a connection.
func (l *listener) event(in *intake, e transport.Event) {
	switch e.Kind {
	case transport.Accepted:
		l.peers.opened(e.FD)
		l.shared.metrics.connections.WithLabelValues("").Inc()
	case transport.Disconnected:
		l.shared.metrics.disconnections.WithLabelValues("").Inc()
		l.peers.closed(in, e.FD)
	default:
	}
}

// process handles messages, and the events of connections before each.
func (l *listener) process(c *transport.Chunk) {
	in := l.shared.intake()
	defer l.shared.giveBack(in)
	began := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	events, n := c.Events, 0
	for i := range c.Len() {
		for len(events) > 0 && events[0].Before <= i {
			l.event(in, events[0].Event)
			events = events[1:]
		}
		if m := c.Batch.Message(i); m.Count > 0 { // else it was dropped
			l.message(in, began, c.Batch, i)
			n++
		}
	}
	for _, e := range events {
		l.event(in, e.Event)
	}
	if c.Drops != nil {
		l.overrun(in, c.Drops, began)
	}
	l.shared.metrics.messages.WithLabelValues("").Add(float64(n))
	l.shared.metrics.observe(began, n)
}

// overrun tells the publishers whose messages may have been dropped.
func (l *listener) overrun(in *intake, d *transport.Drops, now time.Time) {
	for topic, t := range l.topics {
		t.worker.mu.Lock()
		for _, pub := range t.ranks {
			if t.worker.lane != nil && d.MayInclude(topic, pub.peer.descriptor(), pub.otherPeer.descriptor()) {
				pub.apply(in, now, pub.machine.Overrun(now))
			}
		}
		t.worker.mu.Unlock()
	}
}

// peer returns the connection of a message; nil where that is closed. Its address is
// learned from its first message. Peers over ipc are on this machine.
func (l *listener) peer(b *transport.Batch, i int) *peer {
	c := l.peers.byFD[b.Message(i).FD]
	if c != nil && !c.address.IsValid() && !c.addressless {
		var err error
		if c.address, err = netip.ParseAddr(b.PeerAddress(i)); l.local {
			c.address = netip.AddrFrom4([4]byte{127, 0, 0, 1})
		}
		c.addressless = err != nil
	}
	return c
}

// message handles a message.
func (l *listener) message(in *intake, now time.Time, b *transport.Batch, i int) {
	m := b.Message(i)
	why, ok := in.open(m)
	if !ok {
		l.refuse(why, now, m.Frames[0])
		return
	}
	t := l.topics[string(in.topic)]
	if t == nil {
		// A malformed batch creates no worker.
		if in.err != nil {
			l.shared.metrics.rejected.WithLabelValues("", errorName(in.err)).Inc()
			return
		}
		if l.shared.budgets.sources.Full() {
			l.refuse(refusedSources, now, in.topic)
			return
		}
		if t, why, ok = l.accept(in.topic); !ok {
			l.refuse(why, now, in.topic)
			return
		}
	}
	topic := string(in.topic)
	if !l.deliver(in, now, t, b, i) && len(t.ranks) == 0 {
		l.drop(topic, t.worker)
	}
}

// deliver gives the intake's batch to its publisher. It reports false where there may be
// no such publisher.
func (l *listener) deliver(in *intake, now time.Time, t *boundTopic, b *transport.Batch, i int) bool {
	w := t.worker
	w.mu.Lock()
	defer w.mu.Unlock()
	if in.err != nil {
		w.metrics.reject(errorName(in.err))
		w.warn(logRejected, now, "batch rejected", "seq", in.arrival.Seq, "error", in.err)
		return true
	}
	p := l.publisher(t, in.batch, now)
	if p == nil {
		return false
	}
	w.enter()
	c := l.peer(b, i)
	p.connectedBy(in, c)
	var via sequence.ConnectionID
	if c != nil {
		via = c.id
	}
	p.arrive(in, now, via)
	return true
}
