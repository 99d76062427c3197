package vllm

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/internal/zmtp/outbound"
)

// Tests change these.
var (
	// writeTimeout is how long a consumer may read nothing, while up to writeBytes or one larger batch wait.
	writeTimeout = 30 * time.Second
	// heartbeat is zmtp.Limits.Heartbeat. It is longer than writeTimeout, since a PING waits in the kernel's buffers behind data
	// that the consumer need not read yet.
	heartbeat = time.Minute
)

const (
	writeBytes = 256 << 10
	// stateRate is the least rate in bytes a second at which a consumer must read a state.
	stateRate = 1 << 20
	// maxRequests bounds the replay requests of a connection that wait for their answer.
	maxRequests = 16
	// maxRequestBytes bounds what a consumer may send at once: a subscription or a request.
	maxRequestBytes = 8 << 10
)

// conn is a connection of a consumer to a PUB or ROUTER socket.
type conn struct {
	*endpoint
	net      net.Conn
	session  *zmtp.Session // of the reading goroutine
	address  netip.Prefix  // of the peer
	consumer *Consumer     // guarded by Egress.mu
	wakeup   chan struct{}
	// requests are the seqs of replay requests that wait for their answer; nil: the socket answers none. A consumer that sends
	// more than there is room for is disconnected.
	requests chan uint64

	writing chan struct{} // has an element while a goroutine writes
	buffer  []byte        // of the goroutine that sends batches
}

// serve serves a consumer until its connection ends, and reports whether the handshake was completed.
func (p *endpoint) serve(ctx context.Context, c net.Conn, kind zmtp.SocketType) (established bool) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	n := &conn{
		endpoint: p, net: c, address: budget.PeerOf(c.RemoteAddr()), consumer: NewConsumer(), wakeup: make(chan struct{}, 1), writing: make(chan struct{}, 1),
		session: zmtp.New(zmtp.Config{Socket: kind, Limits: zmtp.Limits{
			FrameBytes: maxRequestBytes, Bytes: 2 * maxRequestBytes, Heartbeat: heartbeat,
		}}, time.Now()),
	}
	p.metrics.consumers.Inc()
	defer p.metrics.consumers.Dec()
	write := n.follow
	if kind == zmtp.PUB {
		p.mu.Lock()
		p.conns[n] = struct{}{}
		p.mu.Unlock()
	} else {
		n.requests = make(chan uint64, maxRequests)
		write = n.answerRequests
	}
	var writer sync.WaitGroup
	writer.Go(func() {
		defer cancel() // a writer that fails ends the connection
		n.ended("write", write(ctx))
	})
	err := outbound.Read(c, n.session, n.write, n.event)
	if ctx.Err() == nil {
		n.ended("read", err)
	}
	cancel()
	_ = c.Close()
	writer.Wait()
	p.mu.Lock()
	delete(p.conns, n)
	p.mu.Unlock()
	return n.session.Established()
}

// ended logs why a connection ends, unless its peer has closed it.
func (n *conn) ended(doing string, err error) {
	if err == nil || errors.Is(err, net.ErrClosed) || errors.Is(err, context.Canceled) {
		return
	}
	n.logger.Debug("connection of a consumer has ended", "peer.address", n.net.RemoteAddr().String(), "doing", doing, "error", err)
}

func (n *conn) signal() {
	select {
	case n.wakeup <- struct{}{}:
	default:
	}
}

// errTopics and errRequests end the connection of a consumer with too many subscriptions or requests.
var (
	errTopics   = errors.New("too many subscriptions")
	errRequests = errors.New("too many replay requests wait for their answer")
)

// event processes a subscription or a request.
func (n *conn) event(e *zmtp.Event) error {
	switch e.Kind {
	case zmtp.Subscribe, zmtp.Cancel:
		n.mu.Lock()
		ok := true
		if e.Kind == zmtp.Subscribe {
			ok = n.consumer.Subscribe(string(e.Topic))
		} else {
			n.consumer.Cancel(string(e.Topic))
		}
		n.mu.Unlock()
		if !ok {
			return errTopics
		}
		n.signal()
	case zmtp.Message:
		if n.requests == nil || e.Count != 2 || len(e.Frames[0]) > 0 { // vLLM ignores others, too
			return nil
		}
		select {
		case n.requests <- outbound.ParseSeq(e.Frames[1]):
		default:
			return errRequests
		}
	default:
	}
	return nil
}

// write writes bytes, after or before those of other goroutines.
func (n *conn) write(b []byte) error { return n.writeUntil(time.Time{}, b) }

// writeUntil writes bytes within writeTimeout, and before a time if it is not zero.
func (n *conn) writeUntil(until time.Time, b []byte) error {
	if len(b) == 0 {
		return nil
	}
	n.writing <- struct{}{}
	defer func() { <-n.writing }()
	deadline := time.Now().Add(writeTimeout)
	if !until.IsZero() && until.Before(deadline) {
		deadline = until
	}
	if err := n.net.SetWriteDeadline(deadline); err != nil {
		return err
	}
	_, err := n.net.Write(b)
	return err
}

// send sends batches, each after some frames.
func (n *conn) send(batches []Batch, before ...[]byte) error {
	return n.sendUntil(time.Time{}, batches, before...)
}

// sendUntil is send that ends at a time, if it is not zero.
func (n *conn) sendUntil(until time.Time, batches []Batch, before ...[]byte) error {
	n.buffer = n.buffer[:0]
	for i := range batches {
		b := &batches[i]
		for _, frame := range before {
			n.buffer = zmtp.AppendMore(n.buffer, frame)
		}
		n.buffer = zmtp.AppendMessage(n.buffer, []byte(b.Stream.topic), outbound.SeqFrame(b.Seq), b.Payload)
		if len(n.buffer) < writeBytes && i < len(batches)-1 {
			continue
		}
		if err := n.writeUntil(until, n.buffer); err != nil {
			return err
		}
		n.buffer = n.buffer[:0]
	}
	if cap(n.buffer) > 4*writeBytes {
		n.buffer = nil
	}
	return nil
}

// follow sends what the consumer subscribes to.
func (n *conn) follow(ctx context.Context) error {
	for {
		n.mu.Lock()
		a := n.consumer.Next(n.history, n.streams, n.version, n.sendsStates(), false)
		missed := a.Missed
		if a.State != nil {
			n.mu.Unlock()
			if err := n.states.Acquire(ctx, n.address, 1); err != nil {
				return err
			}
			n.mu.Lock()
			if a = n.consumer.Next(n.history, n.streams, n.version, n.sendsStates(), true); a.State == nil {
				n.states.Release(n.address, 1)
			}
		}
		var state *State
		if a.State != nil {
			state = a.State.State(0, false)
		}
		idle := a.State == nil && len(a.Batches) == 0 && n.consumer.HasAll(n.history, n.version)
		n.mu.Unlock()
		if missed || a.Missed {
			n.metrics.missed.Inc()
		}
		if state != nil {
			if err := n.sendState(ctx, a.State, state); err != nil {
				return err
			}
		}
		if err := n.send(a.Batches); err != nil {
			return err
		}
		if !idle {
			continue
		}
		select {
		case <-n.wakeup:
		case <-ctx.Done():
			return nil
		}
	}
}

// answerRequests answers replay requests until the connection ends, which the reading goroutine notices meanwhile.
func (n *conn) answerRequests(ctx context.Context) error {
	for {
		select {
		case from := <-n.requests:
			if err := n.answer(ctx, from); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// answer answers a request for the batches from a seq on.
func (n *conn) answer(ctx context.Context, from uint64) error {
	n.metrics.replays.Inc()
	var (
		stream  *Stream
		state   *State
		batches []Batch
		through uint64 // the position after the last batch
		at      uint64
	)
	for acquired := false; ; acquired = true {
		n.mu.Lock()
		found := true
		if len(n.streams) > 0 && from < n.streams[0].Next() {
			stream = n.streams[0].Stream
			if at, found = n.history.Find(stream, from); !found && acquired {
				state = stream.State(from, true)
			}
			through = n.history.End()
		} else {
			stream = nil
		}
		n.mu.Unlock()
		if acquired && state == nil {
			n.states.Release(n.address, 1)
		}
		if found || acquired {
			break
		}
		if err := n.states.Acquire(ctx, n.address, 1); err != nil {
			return err
		}
	}
	switch {
	case state != nil:
		if err := n.sendState(ctx, stream, state, nil); err != nil {
			return err
		}
	case stream != nil:
		for at < through {
			n.mu.Lock()
			var ok bool
			batches, at, ok = n.history.Read(at, min(sendBatches, int(through-at)), batches[:0])
			n.mu.Unlock()
			if !ok { // the consumer sees that batches are missing, and requests them again
				break
			}
			if err := n.send(batches, nil); err != nil {
				return err
			}
		}
	}
	end := zmtp.AppendMessage(nil, nil, nil, outbound.SeqFrame(outbound.EndOfReplay), nil)
	return n.write(end)
}
