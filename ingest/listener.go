package ingest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/sequence"
	"github.com/kvcast/kvcast/ingest/transport"
	"github.com/kvcast/kvcast/ingest/wire"
)

// listener takes the messages of a bound socket apart: publishers are told by
// their topic and the dp rank in the batch, workers by the topic. What names
// them comes from the network, so all of it is checked and bounded.
//
// A batch that does not decode can not say its rank. It is counted, and taken for
// none's: the hole in its publisher's seqs tells that it is lost, with the next
// batch. Booked to the wrong rank, it would make that rank's own batch of this
// seq look like a restart, which empties a sound cache.
type listener struct {
	shared   *shared
	config   config.Listener
	address  string
	local    bool // bound to ipc
	conn     *transport.Conn
	inbox    *transport.Inbox
	patterns []string     // of the config, as matchTopic wants them
	hosts    config.Hosts // that replays may be requested from beside the peers themselves
	log      *slog.Logger

	mu sync.Mutex // guards all below; a worker's mu comes after it
	// topics are those that were accepted, by what stands before the NUL.
	topics map[string]*boundTopic
	// workers are those of this listener, by name.
	workers map[string]*boundWorker
	peers   peers
	notices notices
	// spawnIn has a new worker's goroutines belong to the listener.
	spawnIn func(*worker)
}

// boundTopic is the publishers of one topic: the dp ranks of one pod.
type boundTopic struct {
	worker *boundWorker
	source int
	// host is what the topic names for the replay socket; empty where it names none.
	host  string
	ranks map[uint32]*publisher
}

// boundWorker is a worker of a listener.
type boundWorker struct {
	*worker
	model string
	// topics and publishers count; there are MaxRanks publishers at most.
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

// watch has what happens to connections noted while no messages come.
func (l *listener) watch() error {
	for {
		if err := l.conn.Monitor.Wait(); err != nil {
			return err
		}
		l.inbox.AddEvents()
	}
}

// event takes what has happened to a connection.
func (l *listener) event(in *intake, e transport.Event) {
	switch e.Kind {
	case transport.Accepted:
		l.peers.opened(e.Value)
		l.shared.metrics.connections.WithLabelValues("").Inc()
	case transport.Disconnected:
		l.shared.metrics.disconnections.WithLabelValues("").Inc()
		l.peers.closed(in, e.Value)
	default: // nothing that tells where batches come from
	}
}

// process takes some messages, and what happened to connections before each.
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
	l.shared.metrics.turn(began, n)
}

// overrun has the publishers look for what was dropped whose messages were.
func (l *listener) overrun(in *intake, d *transport.Drops, now time.Time) {
	for topic, t := range l.topics {
		t.worker.mu.Lock()
		for _, pub := range t.ranks {
			if t.worker.lane != nil && d.Concern(topic, pub.peer.descriptor(), pub.otherPeer.descriptor()) {
				pub.apply(in, now, pub.machine.Overrun(now))
			}
		}
		t.worker.mu.Unlock()
	}
}

// peer returns the connection that a message came by; nil where that is closed. Its
// address is learned from its first message. Who connects over ipc is on this machine.
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

// message takes a message of the socket.
func (l *listener) message(in *intake, now time.Time, b *transport.Batch, i int) {
	m := b.Message(i)
	why, ok := in.open(m)
	if !ok {
		l.refuse(why, now, m.Frames[0])
		return
	}
	t := l.topics[string(in.topic)]
	if t == nil {
		// A batch that does not decode is not worth a worker.
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

// drop forgets a topic none of whose publishers was admitted, and its worker if it has
// no other: names must not be kept for nobody.
func (l *listener) drop(topic string, w *boundWorker) {
	if t := l.topics[topic]; t.source == w.topics-1 {
		w.topics-- // so that numbers do not grow with what is refused
	}
	delete(l.topics, topic)
	for _, t := range l.topics {
		if t.worker == w {
			return
		}
	}
	if w.publishers > 0 {
		return
	}
	w.close()
	delete(l.workers, w.desc.Name)
	w.forget()
	if l.config.Worker != "" {
		l.shared.roster.reserve(w.desc.Name)
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
		w.warn(noticeRejected, now, "batch rejected", "seq", in.arrival.Seq, "error", in.err)
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

// publisher returns the publisher of a batch; nil where there may be no further one.
func (l *listener) publisher(t *boundTopic, b *wire.Batch, now time.Time) *publisher {
	var rank uint32
	if b.HasRank {
		rank = b.Rank
	}
	p := t.ranks[rank]
	if p == nil {
		if why, ok := l.admit(t, rank); !ok {
			t.worker.refuse(why, now)
			return nil
		}
		t.worker.publishers++
		p = newPublisher(t.worker.worker, t.source, SourceStatus{Engine: l.config.Engine, Endpoint: l.address, Rank: rank}, nil)
		p.replayOf = func(c *peer) string { return l.replayEndpoint(t, rank, c.address) }
		p.copyRule = l.config.Copies.Rule(l.config.Engine)
		t.ranks[rank] = p
	}
	return p
}

// admit takes what a further publisher takes of what all share.
func (l *listener) admit(t *boundTopic, rank uint32) (why refusal, ok bool) {
	sources := l.shared.budgets.sources
	switch {
	case t.worker.publishers >= feed.MaxRanks:
		return refusedRanks, false
	case !sources.Take(1):
		return refusedSources, false
	case !t.worker.admitRank(rank):
		sources.Release(1)
		return refusedRanks, false
	}
	return 0, true
}

// replayEndpoint returns where a publisher is asked for a replay; empty where it is not.
// The worker's mutex is held.
func (l *listener) replayEndpoint(t *boundTopic, rank uint32, peer netip.Addr) string {
	if l.config.ReplayPort <= 0 || t.host == "" || rank >= feed.MaxRanks || l.config.ReplayPort+int(rank) > config.MaxPort {
		return ""
	}
	host, ok := config.ReplayHost(t.host, peer, l.hosts)
	if !ok {
		t.worker.warn(noticeReplayHost, time.Now(), "no replay is requested: the topic names a host that is neither the peer's address nor allowed",
			"rank", rank, "host", t.host, "peer", peer.String(), "hint", "allow it with the listener's replay_hosts")
		return ""
	}
	return config.Endpoint{Transport: config.TransportTCP, Address: host, Port: l.config.ReplayPort}.OfRank(int(rank)).String()
}

// accept begins to read a topic, and its worker if there is none yet.
func (l *listener) accept(topic []byte) (t *boundTopic, why refusal, ok bool) {
	if !matchTopic(l.patterns, string(topic)) {
		return nil, refusedTopic, false
	}
	parts, err := wire.ParseTopic(topic)
	name := l.config.Worker
	if name == "" {
		if err != nil {
			return nil, refusedTopic, false
		}
		name = parts.Pod
	}
	if !config.ValidName(name) || !config.ValidModel(parts.Model) {
		return nil, refusedName, false
	}
	w := l.workers[name]
	switch {
	case w == nil && l.shared.budgets.ranks.Full():
		return nil, refusedRanks, false
	case w == nil:
		// The name of a listener's one worker is reserved for it.
		if l.config.Worker == "" {
			if why, ok := l.shared.roster.claim(name); !ok {
				return nil, why, false
			}
		}
		w = l.addWorker(name, parts.Model)
	case l.config.Worker == "" && w.model != parts.Model:
		return nil, refusedModel, false
	case w.publishers >= feed.MaxRanks:
		return nil, refusedRanks, false
	}
	t = &boundTopic{worker: w, source: w.topics, ranks: make(map[uint32]*publisher, 1)}
	if err == nil {
		t.host = parts.Host()
	}
	w.topics++
	l.topics[string(topic)] = t
	return t, 0, true
}

func (l *listener) addWorker(name, model string) *boundWorker {
	w := &boundWorker{worker: newWorker(l.shared, feed.Worker{Name: name, Model: model}), model: model}
	l.spawnIn(w.worker)
	w.left = func() { l.forget(w) }
	w.log.Info("worker added", "model", model)
	l.workers[name] = w
	return w
}

// forget lets go of a worker that was removed.
func (l *listener) forget(w *boundWorker) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w.mu.Lock()
	back := w.lane != nil || w.closed
	w.mu.Unlock()
	if back {
		return
	}
	w.close()
	delete(l.workers, w.desc.Name)
	for topic, t := range l.topics {
		if t.worker != w {
			continue
		}
		delete(l.topics, topic)
		for _, p := range t.ranks {
			for _, c := range []*peer{p.peer, p.otherPeer} {
				if c != nil {
					delete(c.publishers, p)
				}
			}
		}
	}
	w.forget()
	if l.config.Worker != "" {
		l.shared.roster.reserve(w.desc.Name) // for the listener as long as it is there
	}
}

// refuse counts a message that is not taken.
func (l *listener) refuse(why refusal, now time.Time, topic []byte) {
	l.shared.metrics.refused.WithLabelValues("", why.String()).Inc()
	if suppressed, ok := l.notices.due(noticeOf(why), now); ok {
		const most = 128
		l.log.Warn("message refused", "reason", why.String(), "want", l.wanted(why),
			"topic", string(topic[:min(len(topic), most)]), "suppressed", suppressed)
	}
}

// wanted returns what is wanted here instead of what was refused.
func (l *listener) wanted(why refusal) string {
	patterns := strings.Join(l.config.Topics, " or ")
	switch {
	case why != refusedTopic || l.config.Worker == "" && patterns == config.DefaultTopics:
		return why.wanted()
	case l.config.Worker != "":
		return patterns
	default:
		return topicForm + " that matches " + patterns
	}
}

// close ends the reading of all workers.
func (l *listener) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.workers {
		w.close()
	}
}
