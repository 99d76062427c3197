// Package outbound implements ZeroMQ's PUB and ROUTER sockets over TCP and Unix sockets.
//
// Messages flow in, and are written to the peers that subscribe to them, or to one peer; subscriptions and requests flow out as events. As
// with libzmq, a message that does not fit the queue of a slow peer is dropped for that peer, and the sender never waits.
package outbound

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/kvcast/kvcast/internal/zmtp"
)

// maxMessageBytes bounds what a peer may send: subscriptions and requests.
const maxMessageBytes = 64 << 10

// Bounds of the wait between two connection attempts.
const (
	minRetry = 10 * time.Millisecond
	maxRetry = 100 * time.Millisecond
)

// Config is the configuration of a Socket.
type Config struct {
	// Type is zmtp.PUB or zmtp.ROUTER.
	Type zmtp.SocketType
	// HighWater is how many messages a peer may be behind before further ones are dropped for it; at least 1.
	HighWater int
	// OnEvent is called with each event of a peer, in order, by the goroutine that reads the peer. Calls for different peers are concurrent.
	OnEvent func(Event)
}

// Event is what a peer sent.
type Event struct {
	// Peer identifies the connection: 1, 2, 3 and so on.
	Peer int
	// Kind is zmtp.Subscribe, zmtp.Cancel or zmtp.Message. When a connection ends, its subscriptions are cancelled.
	Kind zmtp.EventKind
	// Topic is what a peer subscribed to, or no longer subscribes to.
	Topic string
	// Frames are a message of up to four frames. The callee owns them.
	Frames [][]byte
}

// Socket is a PUB or ROUTER socket. It is safe for concurrent use.
type Socket struct {
	config   Config
	ctx      context.Context // of the goroutines
	cancel   context.CancelFunc
	done     sync.WaitGroup
	listener net.Listener // nil if the socket connects

	mu    sync.Mutex // guards all below; a peer's mutex comes after it
	peers map[int]*peer
	last  int // the last peer's ID
}

func newSocket(c Config) *Socket {
	s := &Socket{config: c, peers: make(map[int]*peer)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// Bind returns a socket that accepts connections at an address of package net.
func Bind(network, address string, c Config) (*Socket, error) {
	l, err := net.Listen(network, address) //nolint:noctx // binding does not block
	if err != nil {
		return nil, fmt.Errorf("bind %s: %w", address, err)
	}
	s := newSocket(c)
	s.listener = l
	s.done.Go(func() { Accept(s.ctx, l, s.serve) })
	return s, nil
}

// Connect returns a socket that keeps connecting to an address of package net.
func Connect(network, address string, c Config) *Socket {
	s := newSocket(c)
	s.done.Go(func() {
		dialer := net.Dialer{}
		for retry := minRetry; s.ctx.Err() == nil; retry = min(2*retry, maxRetry) {
			if conn, err := dialer.DialContext(s.ctx, network, address); err == nil {
				s.serve(conn)
				retry = minRetry
			}
			Wait(s.ctx, retry)
		}
	})
	return s
}

// Addr returns the address that the socket is bound to; nil if it connects.
func (s *Socket) Addr() net.Addr {
	if s.listener == nil {
		return nil
	}
	return s.listener.Addr()
}

// Publish sends a message to all peers that subscribe to it. A topic is the beginning of the first frame.
func (s *Socket) Publish(frames ...[]byte) {
	message := zmtp.AppendMessage(nil, frames...)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.peers {
		p.publish(frames[0], message, s.config.HighWater)
	}
}

// Send sends a message to one peer, unless it has disconnected.
func (s *Socket) Send(to int, frames ...[]byte) {
	message := zmtp.AppendMessage(nil, frames...)
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.peers[to]; p != nil {
		p.send(message, s.config.HighWater)
	}
}

// Close closes the connections, and waits for that. Messages in the queues are written within the linger time, or dropped.
func (s *Socket) Close(linger time.Duration) {
	if s.listener != nil {
		_ = s.listener.Close()
	}
	if linger > 0 {
		s.drain(time.Now().Add(linger))
	}
	s.cancel()
	s.done.Wait()
}

// drain waits until all queues are written, or a time has passed.
func (s *Socket) drain(until time.Time) {
	s.mu.Lock()
	var peers []*peer
	for _, p := range s.peers {
		peers = append(peers, p)
	}
	s.mu.Unlock()
	timeout := time.After(time.Until(until))
	for _, p := range peers {
		select {
		case <-p.drained():
		case <-timeout:
			return
		}
	}
}

// serve reads a connection until it ends.
func (s *Socket) serve(conn net.Conn) {
	ctx, cancel := context.WithCancel(s.ctx)
	p := &peer{conn: conn, subscriptions: make(map[string]int), wake: make(chan struct{}, 1)}
	var writer sync.WaitGroup
	writer.Go(func() { p.write(ctx) })
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	s.mu.Lock()
	s.last++
	id := s.last
	s.mu.Unlock()
	session := zmtp.New(zmtp.Config{Socket: s.config.Type, Limits: zmtp.Limits{Bytes: maxMessageBytes, Heartbeat: -1}}, time.Now())
	_ = Read(conn, session, p.flush, func(e *zmtp.Event) error {
		s.event(id, p, e)
		return nil
	})
	cancel()
	_ = conn.Close()
	writer.Wait()
	s.mu.Lock()
	delete(s.peers, id)
	s.mu.Unlock()
	for topic, n := range p.subscriptions {
		for range n {
			s.config.OnEvent(Event{Peer: id, Kind: zmtp.Cancel, Topic: topic})
		}
	}
}

// event processes an event of a peer's session.
func (s *Socket) event(id int, p *peer, e *zmtp.Event) {
	switch e.Kind {
	case zmtp.Established:
		s.mu.Lock()
		s.peers[id] = p
		s.mu.Unlock()
	case zmtp.Subscribe:
		topic := string(e.Topic)
		p.subscribe(topic, 1)
		s.config.OnEvent(Event{Peer: id, Kind: e.Kind, Topic: topic})
	case zmtp.Cancel:
		if topic := string(e.Topic); p.subscribe(topic, -1) {
			s.config.OnEvent(Event{Peer: id, Kind: e.Kind, Topic: topic})
		}
	case zmtp.Message:
		if e.Count > zmtp.KeptFrames {
			return
		}
		frames := make([][]byte, e.Count)
		for i := range frames {
			frames[i] = bytes.Clone(e.Frames[i])
		}
		s.config.OnEvent(Event{Peer: id, Kind: e.Kind, Frames: frames})
	default:
	}
}

// peer is a connection.
type peer struct {
	conn net.Conn

	mu            sync.Mutex // guards all below
	subscriptions map[string]int
	queue         net.Buffers
	empty         chan struct{} // closed when nothing is queued; nil unless somebody waits

	wake chan struct{}
}

// subscribe changes the number of a topic's subscriptions by n, and reports whether it did.
func (p *peer) subscribe(topic string, n int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.subscriptions[topic]+n < 0 {
		return false
	}
	if p.subscriptions[topic] += n; p.subscriptions[topic] == 0 {
		delete(p.subscriptions, topic)
	}
	return true
}

// publish queues a message if the peer subscribes to its topic.
func (p *peer) publish(topic, message []byte, highWater int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for t := range p.subscriptions {
		if bytes.HasPrefix(topic, []byte(t)) {
			p.enqueue(message, highWater)
			return
		}
	}
}

func (p *peer) send(message []byte, highWater int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.enqueue(message, highWater)
}

func (p *peer) enqueue(message []byte, highWater int) {
	if len(p.queue) >= highWater {
		return
	}
	p.queue = append(p.queue, message)
	p.signal()
}

func (p *peer) signal() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// drained returns a channel that is closed when all messages are written.
func (p *peer) drained() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.empty == nil {
		p.empty = make(chan struct{})
	}
	p.signal()
	return p.empty
}

// maxWrite is the most messages that one system call writes.
const maxWrite = 64

// write writes the queue until the context ends or the connection fails.
func (p *peer) write(ctx context.Context) {
	for {
		select {
		case <-p.wake:
		case <-ctx.Done():
			return
		}
		for {
			batch := p.take()
			if len(batch) == 0 {
				break
			}
			if _, err := batch.WriteTo(p.conn); err != nil {
				_ = p.conn.Close() // the reader ends
				return
			}
		}
	}
}

// take removes some messages from the queue.
func (p *peer) take() net.Buffers {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := min(len(p.queue), maxWrite)
	if n == 0 {
		p.queue = nil
		if p.empty != nil {
			close(p.empty)
			p.empty = nil
		}
		return nil
	}
	batch := p.queue[:n:n]
	p.queue = p.queue[n:]
	return batch
}

// flush writes what the session sends. Messages of the writer's goroutine may be written before or after, but never between.
func (p *peer) flush(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	_, err := p.conn.Write(b)
	return err
}
