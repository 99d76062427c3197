package admission

import (
	"context"
	"errors"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

// gRPC keeps an answer until the client's flow-control windows have room for it, also when its call has ended: the call then counts as nothing but
// one of the many streams of its connection. So a client that reads no answers could fill the memory with them. Unread bounds them.
const (
	// callBytes is the memory of a call, with an answer of up to smallAnswer bytes.
	callBytes   = 8 << 10
	smallAnswer = 4 << 10
	// maxPooledAnswer is the size of the largest answers whose memory is reused: gRPC's pool has the next larger size at 1 MiB.
	maxPooledAnswer = 32 << 10
	// trackedBytes is the capacity from which on gRPC says when a buffer is not used any more.
	trackedBytes = 1<<10 + 1

	maxUnreadBytes           = 128 << 20
	maxUnreadBytesPerAddress = maxUnreadBytes / 4
)

// Unread bounds the memory of the calls in progress, and of answers until their clients have read them: in all and by address. A connection with an
// answer that its client does not read for one to two timeouts is closed.
type Unread struct {
	total   *budget.Budget
	shares  *budget.Shares
	timeout time.Duration
	stalled func(net.Addr) // called for each connection that is closed
}

// NewUnread returns the limits of a server.
func NewUnread(timeout time.Duration, stalled func(net.Addr)) *Unread {
	total := budget.New("unread_answer_bytes", maxUnreadBytes)
	return &Unread{total, budget.NewShares(total, maxUnreadBytesPerAddress), timeout, stalled}
}

// Total returns the budget of all addresses together.
func (u *Unread) Total() *budget.Budget { return u.total }

// Answer is the memory of a call and its answer. It implements mem.BufferPool for the buffer of the answer.
type Answer struct {
	unread  *Unread
	conn    *connection
	bytes   int64
	period  uint64 // of the connection's answers, when it was encoded
	removed bool   // is none of the connection's answers any more; guarded by unreadAnswers.mu
}

// Begin reserves the memory of a call with a small answer, or returns the client's error. The caller must call Encode or Discard.
func (u *Unread) Begin(ctx context.Context) (*Answer, error) {
	a := &Answer{unread: u, conn: connectionOf(ctx)}
	if r, ok := ctx.Value(receivedKey{}).(*receivedCall); ok {
		r.answer = a
	}
	return a, a.reserve(callBytes)
}

func (a *Answer) reserve(n int64) error {
	if err := a.unread.shares.Reserve(a.conn.peer.prefix, n); err != nil {
		return callerror.New(callerror.TooManyQueries, journal.Bounds{},
			"the answers that are not read take more than %d bytes, of which those of one address may take %d; read them, or try again later",
			int64(maxUnreadBytes), int64(maxUnreadBytesPerAddress))
	}
	a.bytes += n
	return nil
}

// Discard releases the memory of a call that has no answer.
func (a *Answer) Discard() { a.unread.shares.Release(a.conn.peer.prefix, a.bytes) }

// Encode returns an answer of a size in bytes, which encode appends to a buffer. Its memory is released when gRPC has written it to the
// connection, or the connection is closed. The error is the client's, and the memory is then released.
func (a *Answer) Encode(size int, encode func([]byte) []byte) (mem.BufferSlice, error) {
	if size > smallAnswer {
		if err := a.reserve(int64(size)); err != nil {
			a.Discard()
			return nil, err
		}
	}
	var b *[]byte
	if size <= maxPooledAnswer {
		b = mem.DefaultBufferPool().Get(max(size, trackedBytes))
	} else {
		large := make([]byte, 0, size)
		b = &large
	}
	*b = encode((*b)[:0])
	a.conn.unread.add(a)
	return mem.BufferSlice{mem.NewBuffer(b, a)}, nil
}

// Put implements mem.BufferPool: the answer was written, or will not be.
func (a *Answer) Put(b *[]byte) {
	if cap(*b) <= maxPooledAnswer {
		mem.DefaultBufferPool().Put(b)
	}
	a.release()
}

func (a *Answer) release() {
	if a.conn.unread.remove(a) {
		a.Discard()
	}
}

// ended releases an answer of a call that had ended, for a cause (endCause), when gRPC took it: see Unread.End.
func (a *Answer) ended(cause error) {
	if a.conn.unread.remove(a) {
		releaseDropped(a, a, cause)
	}
}

// releaseDropped releases memory that gRPC drops, with the owner, since its stream was ended by the client or by a deadline. A deadline can pass so late
// that gRPC drops nothing.
func releaseDropped[T any](owner *T, a *Answer, cause error) {
	if !a.conn.writing() && !errors.Is(cause, context.DeadlineExceeded) {
		a.Discard()
		return
	}
	a.unread.watch(a.conn)
	dropped := Answer{unread: a.unread, conn: a.conn, bytes: a.bytes}
	runtime.AddCleanup(owner, func(a Answer) { a.Discard() }, dropped)
}

// Get implements mem.BufferPool. gRPC does not call it.
func (*Answer) Get(n int) *[]byte { return mem.DefaultBufferPool().Get(n) }

// unreadAnswers are the answers of a connection that were not written to it. The zero value has none.
type unreadAnswers struct {
	mu    sync.Mutex // guards all below
	bytes int64
	// period is the number of the present period, which has the length of the timeout, and counts are the answers of this period and of those before,
	// by its lowest bit. There are periods while there are answers.
	period uint64
	counts [2]int
	timer  *time.Timer // nil before the first answer
	runs   bool        // whether the timer does
	closed bool
}

// add adds an answer. That of a connection that is closed is released at once.
func (c *unreadAnswers) add(a *Answer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		a.Discard()
		return
	}
	a.period = c.period
	c.bytes += a.bytes
	c.counts[a.period&1]++
	switch {
	case c.runs:
	case c.timer == nil:
		u, conn := a.unread, a.conn // the timer must not keep the answer
		c.timer = time.AfterFunc(u.timeout, func() { c.endPeriod(u, conn) })
	default:
		c.timer.Reset(a.unread.timeout)
	}
	c.runs = true
}

// remove removes an answer. The caller must release its memory if it returns true: otherwise, the answer was removed or the connection closed before.
func (c *unreadAnswers) remove(a *Answer) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || a.removed {
		return false
	}
	a.removed = true
	c.bytes -= a.bytes
	c.counts[a.period&1]--
	return true
}

// endPeriod closes the connection if an answer of the period before is left.
func (c *unreadAnswers) endPeriod(u *Unread, conn *connection) {
	c.mu.Lock()
	stalled := !c.closed && c.counts[(c.period+1)&1] > 0
	c.period++
	if c.runs = !c.closed && !stalled && c.counts[(c.period+1)&1] > 0; c.runs {
		c.timer.Reset(u.timeout)
	}
	c.mu.Unlock()
	if stalled {
		u.close(conn)
	}
}

// close releases all answers.
func (c *unreadAnswers) close(u *Unread, conn *connection) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	c.closed = true
	if c.timer != nil {
		c.timer.Stop()
	}
	u.shares.Release(conn.peer.prefix, c.bytes)
}

// streamBytes is about the memory of a stream that has ended and was not read: gRPC lets it send so much, and one message more.
const streamBytes = 128 << 10

// Sent tracks whether gRPC has written the messages of a stream to its connection. It implements mem.BufferPool for an empty buffer at the end of each
// message. The zero value is ready for use.
type Sent struct {
	pending atomic.Int64
	ended   atomic.Pointer[func()] // called when none is pending; nil before End
}

var noBytes = make([]byte, 0, trackedBytes)

// Track adds the empty buffer to a message.
func (s *Sent) Track(message mem.BufferSlice) mem.BufferSlice {
	s.pending.Add(1)
	return append(message, mem.NewBuffer(&noBytes, s))
}

// Put implements mem.BufferPool: a message was written, or will not be.
func (s *Sent) Put(*[]byte) {
	if s.pending.Add(-1) == 0 {
		s.callEnded()
	}
}

// Get implements mem.BufferPool. gRPC does not call it.
func (*Sent) Get(n int) *[]byte { return mem.DefaultBufferPool().Get(n) }

func (s *Sent) callEnded() {
	if ended := s.ended.Swap(nil); ended != nil {
		(*ended)()
	}
}

// whenWritten calls a function when no message is pending.
func (s *Sent) whenWritten(f func()) {
	if s.ended.Store(&f); s.pending.Load() == 0 {
		s.callEnded()
	}
}

// End is called at the end of a stream, which sends nothing more, while it still uses its place. What its client has not read counts as an answer. If there
// are too many of those, End waits until it is read, for at most a timeout, after which it closes the connection. err is the error of the stream.
//
// That a client has cancelled a stream says nothing about whether it reads. gRPC drops what it has not written of the stream as soon as the goroutine
// that writes the connection proceeds, and does not always call Put for it. It uses memory until then if that goroutine is blocked in a write.
func (u *Unread) End(ctx context.Context, s *Sent, err error) {
	c, cause := connectionOf(ctx), endCause(ctx, err)
	if r, ok := ctx.Value(receivedKey{}).(*receivedCall); ok && cause == nil {
		r.ended.Store(true)
	}
	switch a := (&Answer{unread: u, conn: c}); {
	case s.pending.Load() == 0:
	case a.reserve(streamBytes) != nil:
		u.wait(ctx, c, s)
	case cause != nil:
		releaseDropped(s, a, cause)
	default:
		c.unread.add(a)
		s.whenWritten(a.release)
	}
}

// endCause returns what has ended a call, whose handler has returned an error, if any: context.Canceled for its client, context.DeadlineExceeded for its
// deadline, and nil for the server. It is also nil if the call has not ended.
func endCause(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		if status.Code(err) == codes.Canceled { // gRPC may end the stream a moment before its context
			return context.Canceled
		}
		return nil
	}
	if cause := context.Cause(ctx); errors.Is(cause, context.Canceled) || errors.Is(cause, context.DeadlineExceeded) {
		return cause
	}
	return nil
}

// watch closes a connection if a write that is in progress blocks it for a timeout: gRPC then keeps what the client has cancelled.
func (u *Unread) watch(c *connection) {
	if c.writing() && c.watched.CompareAndSwap(false, true) {
		u.watchFrom(c, c.edges.Load())
	}
}

// watchFrom looks again after a timeout: it closes the connection if the write is still the one at which edges had the given value, watches on if it is
// another one, and ends if none is in progress.
func (u *Unread) watchFrom(c *connection, edges uint64) {
	time.AfterFunc(u.timeout, func() {
		switch now := c.edges.Load(); {
		case now&1 == 0:
			c.watched.Store(false)
		case now == edges:
			u.close(c)
		default:
			u.watchFrom(c, now)
		}
	})
}

// wait waits until the messages of a stream are written, or it is cancelled and no write is in progress. After a timeout, it closes the connection.
func (u *Unread) wait(ctx context.Context, c *connection, s *Sent) {
	written := make(chan struct{})
	s.whenWritten(func() { close(written) })
	check := time.NewTicker(u.timeout / 16)
	defer check.Stop()
	for range 16 {
		select {
		case <-written:
			return
		case <-check.C:
			if errors.Is(endCause(ctx, nil), context.Canceled) && !c.writing() {
				return
			}
		}
	}
	u.close(c)
}

// close closes a connection whose client does not read.
func (u *Unread) close(c *connection) {
	u.stalled(c.Conn.RemoteAddr())
	_ = c.Conn.Close() // gRPC notices, and calls connection.Close
}
