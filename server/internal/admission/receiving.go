package admission

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/tap"
)

// A call uses memory as soon as its headers are received, and gRPC receives the request of a unary call before any interceptor runs. The
// server therefore limits the number of calls whose request is being received, and the time to receive it. Calls beyond the limit are
// admitted: gRPC takes their data up to receiveWindow, and no more until an earlier request is complete or has timed out. At the limit of
// admitted calls, a connection that starts another one is not read for as long. No call is refused. One client address may have at most a
// quarter of these calls, and one connection half of those of its address that are received, so that a slow client does not block others.
//
// A connection that is not read cannot complete its earlier requests. A client may send the headers of many calls
// before it sends their requests, so many calls are admitted. One that sends more headers than that before the first
// request is not read until the calls that are received have timed out.
const (
	maxReceiving              = 256 // with up to MaxRequestBytes each
	maxReceivingPerAddress    = 64
	maxReceivingPerConnection = 32
	// Each has up to receiveWindow of data, which takes four times as much memory if it comes in small frames.
	maxAdmitted           = 2048
	maxAdmittedPerAddress = 512
)

// take takes an element of each of some limits, in order, so that who waits for the first is not in the way of others that
// wait for the second. It returns a function that gives them back, and false if done was closed before.
func take(done <-chan struct{}, limits ...chan struct{}) (free func(), ok bool) {
	for i, limit := range limits {
		select {
		case limit <- struct{}{}:
		case <-done:
			give(limits[:i])
			return nil, false
		}
	}
	return func() { give(limits) }, true
}

func give(limits []chan struct{}) {
	for _, limit := range limits {
		<-limit
	}
}

// receivedCall is a call. It is admitted at first, and then its request is received. Afterwards, it has the last answer.
type receivedCall struct {
	cancel context.CancelCauseFunc // of the call
	answer *Answer                 // the last one; nil: none
	// ended is set when the server has ended the stream, while it may still be sending.
	ended atomic.Bool
	mu    sync.Mutex  // guards all below
	free  func()      // what it has of the limits; nil: nothing, and it gets nothing any more
	late  *time.Timer // nil while it is admitted
}

// begin ends the admission, and gives the call the slots of one whose request is received, and some time for that, after which
// it calls late. It returns false if the call has ended.
func (r *receivedCall) begin(free func(), timeout time.Duration, late func()) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.free == nil {
		return false
	}
	r.free()
	r.free, r.late = free, time.AfterFunc(timeout, late)
	return true
}

// end frees what the call has. Further calls do nothing.
func (r *receivedCall) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.free != nil {
		r.free()
		r.free = nil
	}
	if r.late != nil {
		r.late.Stop()
	}
}

// errLate is the cause of the end of a call whose request was not complete in time.
var errLate = errors.New("the request was not received in time")

// receivedKey is the key under which the context of a call has its *receivedCall.
type receivedKey struct{}

// Receiving bounds the calls whose requests are being received. It is a stats.Handler that delays calls until their requests may be.
type Receiving struct {
	timeout   time.Duration
	late      prometheus.Counter
	ended     <-chan struct{}
	receiving chan struct{} // has one element per call whose request is being received
	admitted  chan struct{} // has one element per call whose request will be received
}

// NewReceiving returns the limits of a server. A call is cancelled, and counted as late, if its request is not complete within the timeout
// from when it is received. Calls that begin after ended is closed are not limited.
func NewReceiving(timeout time.Duration, late prometheus.Counter, ended <-chan struct{}) *Receiving {
	return &Receiving{timeout, late, ended, make(chan struct{}, maxReceiving), make(chan struct{}, maxAdmitted)}
}

// Len returns the number of calls whose request is being received.
func (s *Receiving) Len() int { return len(s.receiving) }

// Admit is a tap handle: gRPC calls it when the headers of a call are complete, in the goroutine that reads the connection.
func (s *Receiving) Admit(ctx context.Context, _ *tap.Info) (context.Context, error) {
	free, ok := take(s.ended, connectionOf(ctx).peer.admitted, s.admitted)
	if !ok {
		return ctx, nil
	}
	ctx, cancel := context.WithCancelCause(ctx)
	r := &receivedCall{cancel: cancel, free: free}
	context.AfterFunc(ctx, r.end)
	return context.WithValue(ctx, receivedKey{}, r), nil
}

// TagConn implements stats.Handler.
func (*Receiving) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements stats.Handler.
func (*Receiving) HandleConn(context.Context, stats.ConnStats) {}

// HandleRPC implements stats.Handler. gRPC calls it with an OutPayload after it has taken a message from a call, in the goroutine that sends the message.
func (*Receiving) HandleRPC(ctx context.Context, event stats.RPCStats) {
	if _, ok := event.(*stats.OutPayload); !ok || ctx.Err() == nil {
		return
	}
	r, ok := ctx.Value(receivedKey{}).(*receivedCall)
	if cause := endCause(ctx, nil); ok && cause != nil && r.answer != nil && !r.ended.Load() {
		r.answer.ended(cause)
	}
}

// TagRPC implements stats.Handler. gRPC calls it in the goroutine of the call, before it receives the request. The request
// has been received when requestReceived is called, when the call ends, or after the timeout, which cancels the call.
func (s *Receiving) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context {
	r, ok := ctx.Value(receivedKey{}).(*receivedCall)
	if !ok {
		return ctx
	}
	c := connectionOf(ctx)
	free, ok := take(ctx.Done(), c.receiving, c.peer.receiving, s.receiving)
	if ok && !r.begin(free, s.timeout, func() {
		s.late.Inc()
		r.cancel(errLate)
	}) {
		free()
	}
	return ctx
}

// requestReceived ends the receiving of a call's request. Further calls do nothing.
func requestReceived(ctx context.Context) {
	if r, ok := ctx.Value(receivedKey{}).(*receivedCall); ok {
		r.end()
	}
}

// UnaryReceived is the first unary interceptor. gRPC has received the request before it calls an interceptor.
func UnaryReceived(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	requestReceived(ctx)
	doNotCompress(ctx)
	return handler(ctx, req)
}

// StreamReceived is the first stream interceptor. The request of a server stream is complete when RecvMsg
// returns. Client streams are limited by quotas instead: MatchPrefixes, and reflection other streams without a token.
func StreamReceived(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	doNotCompress(stream.Context())
	if info.IsClientStream {
		requestReceived(stream.Context())
		return handler(srv, stream)
	}
	return handler(srv, receivingStream{stream})
}

// doNotCompress makes the messages of a call that is compressed itself be sent as they are: otherwise, gRPC would copy each for each client, and
// keep the copies instead of what Unread and Sent track.
func doNotCompress(ctx context.Context) { _ = grpc.SetSendCompressor(ctx, encoding.Identity) } // no message was sent

type receivingStream struct{ grpc.ServerStream }

func (s receivingStream) RecvMsg(m any) error {
	defer requestReceived(s.Context())
	return s.ServerStream.RecvMsg(m)
}
