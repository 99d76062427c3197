package native

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/ledger"
	"github.com/kvcast/kvcast/internal/zmtp"
)

const (
	// writeTimeout bounds the writing of a greeting, a command or a request.
	writeTimeout = 5 * time.Second
	// chunksInFlight is how many chunks of a connection may wait to be recycled: one is processed while the next is read.
	chunksInFlight = 2
)

// errEvicted is why a connection was closed to free memory.
var errEvicted = &zmtp.Error{Reason: reasonMemory, Detail: "large messages of all peers exceed their memory, and this peer's is not complete"}

// errExtended is why a connection was closed whose message had a further large frame.
var errExtended = &zmtp.Error{Reason: reasonMemory, Detail: "large messages of all peers exceed their memory, and this peer's has a further large frame"}

// reasonMemory is the reason of errEvicted and errExtended.
const reasonMemory zmtp.Reason = "memory"

// stream is what a conn reads and writes.
type stream interface {
	net.Conn
	syscall.Conn
}

// conn reads one connection. One goroutine runs it.
type conn struct {
	receiver *Receiver
	ctx      context.Context // done when the connection must end
	id       int
	peer     netip.Addr
	address  netip.Prefix // of peer, for limits
	net      stream
	raw      syscall.RawConn
	session  *zmtp.Session
	request  []byte        // sent when the connection is established
	ttl      time.Duration // of the PINGs that keepPinging sends; 0: none
	event    zmtp.Event    // reused for each message

	// rest are the bytes of an incomplete message, of need bytes at least. claim is for its memory, if the message is large, or
	// more than a few bytes have arrived. If it is large, rest grows in place.
	rest  []byte
	need  int
	claim *ledger.Claim
	large bool

	// inFlight has an element for each chunk that was not recycled.
	inFlight chan struct{}

	// What tryRead exchanges with read.
	buffer   *[readBytes]byte
	reserved bool // a read buffer is acquired from Receiver.reads
	n        int
	err      error
	try      func(fd uintptr) bool // tryRead

	evicted chan struct{}
	// established reports whether the handshake was completed.
	established atomic.Bool
	// done is closed when the connection's last event is in the queue, if it was accepted.
	done chan struct{}
	// reading is closed after a read; nil if nothing waits for it.
	reading atomic.Pointer[chan struct{}]
}

func newConn(ctx context.Context, r *Receiver, id int, c net.Conn) *conn {
	n := &conn{
		receiver: r, ctx: ctx, id: id, peer: address(c), net: c.(stream),
		inFlight: make(chan struct{}, chunksInFlight), evicted: make(chan struct{}), done: make(chan struct{}),
	}
	n.address = budget.AddressOf(n.peer)
	n.raw, _ = n.net.SyscallConn() // fails if the connection is nil
	n.try = n.tryRead
	return n
}

// notEstablished is the error of a connection whose handshake was not completed.
type notEstablished struct{ error }

func (e *notEstablished) Unwrap() error { return e.error }

// serve reads a connection until it ends, and closes it. It sends a request, if there is one, when the connection is established.
func (c *conn) serve(request []byte) error {
	r := c.receiver
	c.request, c.session = request, zmtp.New(r.session, time.Now())
	stop := context.AfterFunc(c.ctx, func() { _ = c.net.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	err := c.run()
	c.releaseClaim()
	if c.reserved {
		r.reads.Release(1)
	}
	release(c.rest)
	if c.ctx.Err() != nil {
		err = transport.ErrInterrupted
	}
	if !c.session.Established() {
		err = &notEstablished{err}
	}
	return errors.Join(err, c.net.Close())
}

// run reads until the connection ends, and returns why.
func (c *conn) run() error {
	if err := c.flush(); err != nil {
		return err
	}
	if err := c.setReadDeadline(); err != nil {
		return err
	}
	for {
		err := c.read()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			if err := c.tick(); err != nil {
				return err
			}
			continue
		case err != nil:
			return err
		}
		if err := c.parse(time.Now()); err != nil {
			return err
		}
		if waiting := c.reading.Swap(nil); waiting != nil {
			close(*waiting)
		}
	}
}

// tick passes the time to the session, and sends what is due, such as a PING. It may be called before
// anything is due: the read deadline is not moved with each message.
func (c *conn) tick() error {
	if err := c.ended(); err != nil {
		return err
	}
	if err := c.session.Tick(time.Now()); err != nil {
		return err
	}
	if err := c.flush(); err != nil {
		return err
	}
	return c.setReadDeadline()
}

// ended returns why the connection must end; nil if it need not.
func (c *conn) ended() error {
	if c.ctx.Err() != nil {
		return transport.ErrInterrupted
	}
	select {
	case <-c.evicted:
		return errEvicted
	default:
		return nil
	}
}

// setReadDeadline sets the session's deadline, unless the connection must end: that sets a deadline
// in the past, which this may have replaced.
func (c *conn) setReadDeadline() error {
	if err := c.net.SetReadDeadline(c.session.Deadline()); err != nil {
		return err
	}
	return c.ended()
}

// flush writes what the session sends.
func (c *conn) flush() error {
	out := c.session.Out()
	if len(out) == 0 {
		return nil
	}
	return c.write(out)
}

func (c *conn) write(b []byte) error {
	if err := c.net.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	if c.ctx.Err() != nil {
		return transport.ErrInterrupted // its deadline was replaced
	}
	_, err := c.net.Write(b)
	return err
}

// read waits for bytes, and appends them to rest or, with rest before them, to buffer.
//
// A connection has no read buffer while it waits: thousands of idle connections need no memory for it.
func (c *conn) read() error {
	select {
	case c.inFlight <- struct{}{}:
		<-c.inFlight // parse adds it again, if there is a chunk
	case <-c.evicted:
		return errEvicted
	case <-c.ctx.Done():
		return transport.ErrInterrupted
	}
	if err := c.ended(); err != nil {
		return err
	}
	if err := c.grow(); err != nil {
		return err
	}
	for {
		c.n, c.err = 0, nil
		if err := c.raw.Read(c.try); err != nil {
			if !errors.Is(err, os.ErrDeadlineExceeded) || c.ended() != nil {
				return err
			}
			// The peer may have sent in time, while this connection waited for memory.
			idle := true
			if closed := c.raw.Control(func(fd uintptr) { idle = !c.try(fd) }); closed != nil || idle {
				return err
			}
		}
		switch {
		case c.n > 0:
			return nil
		case c.err != nil:
			return c.err
		}
		// Data is there, and no read buffer is free.
		if err := c.receiver.reads.Acquire(c.ctx, 1); err != nil {
			return transport.ErrInterrupted
		}
		c.reserved = true
	}
}

// tryRead reads without blocking. It reports false if there is nothing to read.
func (c *conn) tryRead(fd uintptr) bool {
	if c.large {
		return c.system(fd, c.rest[len(c.rest):min(cap(c.rest), c.need)])
	}
	if !c.reserved && !c.receiver.reads.TryAcquire(1) {
		return true
	}
	c.reserved = false
	c.buffer = readBuffers.Get().(*[readBytes]byte)
	kept := copy(c.buffer[:], c.rest)
	done := c.system(fd, c.buffer[kept:])
	if c.n == 0 {
		c.releaseBuffer()
	}
	return done
}

// system reads into b, without blocking.
func (c *conn) system(fd uintptr, b []byte) bool {
	for {
		n, err := syscall.Read(int(fd), b)
		switch {
		case errors.Is(err, syscall.EINTR):
			continue
		case errors.Is(err, syscall.EAGAIN):
			return false
		case err != nil:
			c.err = os.NewSyscallError("read", err)
		case n == 0:
			c.err = io.EOF
		}
		c.n = max(n, 0)
		return true
	}
}

func (c *conn) releaseBuffer() {
	readBuffers.Put(c.buffer)
	c.buffer = nil
	c.receiver.reads.Release(1)
}

// parse processes the bytes that read has appended.
func (c *conn) parse(now time.Time) error {
	from := c.rest
	if !c.large {
		from = c.buffer[:]
	}
	in := from[:len(c.rest)+c.n]
	chunk, used, failed := c.events(now, in)
	switch {
	case c.large && used == 0:
		c.rest = in
	case c.large && chunk != nil:
		c.receiver.transport.larges.Complete(c.claim)
		chunk.large, chunk.claim = in, c.claim
		c.rest, c.claim, c.large = nil, nil, false
		c.keep(in[used:]) // some bytes, if the header of the last frame was not known
	default: // if the message is large, after a command before it
		if used > 0 {
			c.releaseClaim()
		}
		c.keep(in[used:])
	}
	if c.claim != nil {
		c.claim.Arrived(len(c.rest))
	}
	switch {
	case chunk != nil:
		chunk.buffer, c.buffer = c.buffer, nil
		c.inFlight <- struct{}{} // read found room for it
		c.receiver.push(chunk)
	case c.buffer != nil:
		c.releaseBuffer()
	}
	if failed != nil {
		return failed
	}
	return c.flush()
}

// events decodes the whole events of in, and returns their messages and the number of their bytes.
func (c *conn) events(now time.Time, in []byte) (chunk *chunk, used int, err error) {
	for {
		n, err := c.session.Next(now, in[used:], &c.event)
		if err != nil {
			return chunk, used, err
		}
		switch c.event.Kind {
		case zmtp.Incomplete:
			return chunk, used, nil
		case zmtp.Established:
			c.established.Store(true)
			c.receiver.push(eventChunk(transport.Event{Kind: transport.Connected, Conn: c.id}))
			if c.ttl > 0 && c.session.AnswersPings() {
				// The subscription is sent first: a peer forgets the TTL of a PING when anything else follows it.
				if err := c.flush(); err != nil {
					return chunk, used, err
				}
				c.receiver.done.Go(c.keepPinging)
			}
			if len(c.request) > 0 {
				if err := errors.Join(c.flush(), c.write(c.request)); err != nil {
					return chunk, used, err
				}
			}
			if err := c.setReadDeadline(); err != nil {
				return chunk, used, err
			}
		case zmtp.Message:
			if chunk == nil {
				chunk = newChunk(c)
			}
			chunk.append(&c.event)
		default:
		}
		used += n
	}
}

// keep copies the bytes of an incomplete message to rest. They are less than a read buffer.
func (c *conn) keep(rest []byte) {
	buffer := c.rest[:0]
	if len(rest) == 0 && cap(buffer) > smallPartial || c.large {
		buffer = nil
	}
	kept := append(grown(buffer, len(rest)), rest...)
	if buffer == nil {
		release(c.rest)
	}
	c.rest, c.large = kept, false
}

// releaseClaim releases the claim, if there is one.
func (c *conn) releaseClaim() {
	if c.claim != nil {
		c.receiver.transport.larges.Release(c.claim)
		c.claim = nil
	}
}

// grow claims the memory of an incomplete message, and makes room in rest for what follows, if the message is large. It waits for memory.
func (c *conn) grow() error {
	if len(c.rest) == 0 {
		return nil
	}
	if c.need = c.session.Need(c.rest); c.need <= readBytes/2 && len(c.rest) <= smallPartial && c.claim == nil {
		return nil
	}
	if c.claim == nil {
		if err := c.await(); err != nil {
			return err
		}
	} else if !c.receiver.transport.larges.Extend(c.claim, capacity(c.need)) {
		return errExtended
	}
	if c.large = c.large || c.need > readBytes/2; c.large && (len(c.rest) == cap(c.rest) || cap(c.rest) < readBytes) {
		// The size that a peer announces is not believed: memory grows with what arrives.
		c.rest = grown(c.rest, min(c.need, max(2*len(c.rest), readBytes)))
	}
	return nil
}

// await claims the memory of a message, and waits until the claim is granted.
func (c *conn) await() error {
	c.claim = ledger.NewClaim(c.address, capacity(c.need), c.evict)
	c.claim.Arrived(len(c.rest))
	c.receiver.transport.larges.Request(c.claim)
	select {
	case <-c.claim.Granted():
		return nil
	case <-c.evicted:
		return errEvicted
	case <-c.ctx.Done():
		return transport.ErrInterrupted
	}
}

// evict closes the connection to free the memory of its message, unless there are bytes to read. It is called with the ledger's mutex locked.
func (c *conn) evict() bool {
	if available, _ := c.peek(); available {
		return false
	}
	close(c.evicted)
	_ = c.net.SetReadDeadline(time.Unix(1, 0))
	return true
}
