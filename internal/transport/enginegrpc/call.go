package enginegrpc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/transport"
)

const (
	// windowBytes is how much a server may send that was not read, beside the rest of a response that is being read: the least that
	// gRPC allows, because each call may use it.
	windowBytes = 64 << 10
	// maxKeptResponse is how much memory of responses a call keeps from one to the next.
	maxKeptResponse = 64 << 10
	// maxHeaderBytes is the size of the largest headers.
	maxHeaderBytes = 64 << 10
)

// Errors of calls.
var (
	errTimeout      = errors.New("the server did not answer in time")
	errEnded        = errors.New("the server ended the call")
	errCannotResume = errors.New("the server cannot resume the call")
	errAway         = errors.New("the server ended the connection before the call began")
)

// call is one call of SubscribeKvEvents, over a connection of its own. Its goroutine alone uses it.
type call struct {
	transport      *Transport
	receiver       *transport.Queue
	protocol       *protocol
	address        string
	rank           uint32
	ranks          []uint32
	reportsForeign bool
	model, epoch   string
	// instance identifies the call to LMCache, and cursor is the seq of its last record that was passed on. topic is that of its messages.
	instance int64
	cursor   uint64
	topic    []byte
	// from is the first seq wanted; 0 if the call does not resume.
	from    uint64
	timeout time.Duration
	// conn is the connection, which gRPC opens and closes.
	conn atomic.Pointer[conn]
	// mayDial reports whether gRPC may open a connection: once for each call of a method. It would replace a connection that the server ends with a GOAWAY,
	// or before the call begins, at once and again and again.
	mayDial atomic.Bool

	// connected reports whether the event Connected was passed on, and responded whether there was a response.
	connected, responded bool
}

// run calls the server, and passes on what it sends until the call ends.
func (c *call) run() {
	err := c.dial()
	kind := transport.Failed
	if c.connected {
		kind = transport.Disconnected
	}
	if c.receiver.Context().Err() != nil {
		err = transport.ErrInterrupted
	}
	c.receiver.PushEvent(transport.Event{Kind: kind, Conn: 1, Err: err})
	c.receiver.End(transport.ErrEnded)
}

// connection is what calls are made over.
type connection interface {
	grpc.ClientConnInterface
	Close() error
}

// dial opens a connection and calls the server: first to resume, if that is wanted, and then from the present state.
func (c *call) dial() error {
	open := (*call).open
	if c.protocol.open != nil {
		open = c.protocol.open
	}
	conn, err := open(c)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // the error is that it was closed before
	if c.from > 0 {
		err := c.callAny(conn)
		if !errors.Is(err, errCannotResume) || c.connected {
			return err
		}
		c.from = 0
	}
	return c.callAny(conn)
}

// open returns a connection of gRPC, which connects with the first call.
func (c *call) open() (connection, error) {
	return grpc.NewClient("passthrough:///"+c.address,
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(c.dialTCP), grpc.WithNoProxy(),
		grpc.WithUserAgent("kvcast"), grpc.WithDisableServiceConfig(), grpc.WithDisableRetry(), grpc.WithIdleTimeout(0),
		grpc.WithStaticStreamWindowSize(windowBytes), grpc.WithStaticConnWindowSize(windowBytes),
		grpc.WithMaxHeaderListSize(maxHeaderBytes),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(codec{}), grpc.MaxCallRecvMsgSize(transport.MaxPayloadBytes),
			experimental.AcceptCompressors()), // none, because the memory of a response is that of what was read
	)
}

// dialTCP opens a connection whose end is noticed. gRPC's own keepalive pings are not used: servers close connections with pings
// more often than every five minutes.
func (c *call) dialTCP(ctx context.Context, address string) (net.Conn, error) {
	if !c.mayDial.CompareAndSwap(true, false) {
		return nil, errAway
	}
	dialer := net.Dialer{Timeout: transport.ConnectTimeout, KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: transport.KeepaliveIdle, Interval: transport.KeepaliveInterval, Count: transport.KeepaliveCount,
	}}
	opened, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	n := &conn{Conn: opened, transport: c.transport, address: budget.PeerOf(opened.RemoteAddr()), closed: make(chan struct{})}
	c.conn.Store(n)
	return n, nil
}

// callAny calls the method that the server has.
func (c *call) callAny(conn connection) (err error) {
	for _, method := range c.protocol.methods {
		if err = c.call(conn, method); status.Code(err) != codes.Unimplemented || c.connected {
			break
		}
	}
	return err
}

// call calls a method, and passes on what the server sends until the call ends.
func (c *call) call(conn connection, method string) error {
	ctx, cancel := context.WithCancelCause(c.receiver.Context())
	defer cancel(nil)
	c.mayDial.Store(true)
	limit := time.AfterFunc(c.timeout, func() { cancel(errTimeout) })
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method)
	if err == nil {
		err = stream.SendMsg(c.protocol.request(c))
	}
	if err == nil || errors.Is(err, io.EOF) { // the error of the call is that of RecvMsg
		err = stream.CloseSend()
	}
	if !limit.Stop() && context.Cause(ctx) != nil {
		return fmt.Errorf("call %s: %w%s", c.address, context.Cause(ctx), c.protocol.how)
	}
	if err != nil {
		return c.explain(err)
	}
	var response []byte
	if err := c.begin(stream, &response); err != nil {
		return c.explain(err)
	}
	if c.protocol.alive != nil {
		var alive sync.WaitGroup
		defer alive.Wait()
		defer cancel(nil)
		alive.Go(func() { c.protocol.alive(ctx, c, conn) })
	}
	for {
		if response != nil {
			c.responded = true
			err := c.pass(response)
			response = kept(response, maxKeptResponse)
			if err != nil {
				return err
			}
		}
		if err := stream.RecvMsg(&response); err != nil {
			return c.explain(err)
		}
	}
}

// begin waits until the server has accepted the call, and sets connected. A call that resumes begins with a response, or an
// error. Any other begins with headers, unless the server sends them with the first response only.
func (c *call) begin(stream grpc.ClientStream, response *[]byte) error {
	accepted := make(chan error, 1)
	go func() {
		if c.from > 0 {
			accepted <- stream.RecvMsg(response)
			return
		}
		headers, err := stream.Header()
		if headers == nil && err == nil { // the call has ended
			err = stream.RecvMsg(response)
		}
		accepted <- err
	}()
	limit := time.NewTimer(c.timeout)
	defer limit.Stop()
	select {
	case err := <-accepted:
		if err != nil {
			return err
		}
		if err := c.refusal(*response); err != nil {
			return err
		}
		c.connect()
		return nil
	case <-limit.C:
		c.connect()
		return <-accepted
	}
}

// refusal returns why the server cannot resume the call, if the first response says that; nil otherwise.
func (c *call) refusal(response []byte) error {
	if c.from == 0 {
		return nil
	}
	converter, err := c.takeConverter() // what is read of a response takes memory too
	if err != nil {
		return err
	}
	defer c.returnConverter(converter)
	return c.protocol.refuses(c, response)
}

// refusesHeader is protocol.refuses by header.cannotResume.
func refusesHeader(c *call, response []byte) error {
	if h, err := c.protocol.read(response); err == nil && h.cannotResume {
		return errors.Join(errCannotResume, h.ended)
	}
	return nil
}

// takeConverter waits for a converter. The caller must return it.
func (c *call) takeConverter() (*converter, error) {
	select {
	case converter := <-c.transport.converters:
		converter.protocol = c.protocol
		return converter, nil
	case <-c.receiver.Context().Done():
		return nil, transport.ErrInterrupted
	}
}

func (c *call) returnConverter(converter *converter) { c.transport.converters <- converter }

// connect passes on that the server has accepted the call.
func (c *call) connect() {
	c.connected = true
	c.mayDial.Store(false)
	c.receiver.PushEvent(transport.Event{Kind: transport.Connected, Conn: 1, Resumed: c.from > 0})
}

// explain adds what an error of the call means for the next call.
func (c *call) explain(err error) error {
	code := status.Code(err)
	ended := errors.Is(err, io.EOF)
	// If a call that resumes ends before its first response, the server cannot resume it, and the next call must not try, except for the
	// codes below: the server may be away, or it refuses all calls.
	cannotResume := c.from > 0 && !c.responded && (ended || !slices.Contains([]codes.Code{
		codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Unauthenticated, codes.PermissionDenied,
	}, code))
	switch {
	case ended:
		err = errEnded
	case strings.Contains(err.Error(), "server preface"): // of gRPC, which has no error for it
		err = fmt.Errorf("%w; want a gRPC server", err)
	}
	switch {
	case cannotResume && c.connected:
		return fmt.Errorf("%w: %w", transport.ErrLost, err)
	case cannotResume:
		return errors.Join(errCannotResume, err)
	case c.connected && slices.Contains([]codes.Code{codes.DataLoss, codes.OutOfRange, codes.ResourceExhausted}, code):
		// The call cannot go on from the last batch. gRPC's own error for a response that is too large is ResourceExhausted.
		return fmt.Errorf("%w: %w", transport.ErrLost, err)
	}
	return err
}

// pass passes on a response. The error is why the call cannot go on.
func (c *call) pass(response []byte) error {
	memory := c.transport.memory
	claim := c.conn.Load().takeClaim(len(response))
	if !await(claim, c.receiver.Context().Done()) {
		memory.Release(claim)
		return transport.ErrInterrupted
	}
	memory.Complete(claim)
	memory.Shrink(claim, claimBytes(len(response)))
	if c.protocol.pass != nil {
		defer memory.Release(claim)
		return c.protocol.pass(c, response)
	}
	m, err := c.message(response)
	if err != nil || m == nil {
		memory.Release(claim)
		return err
	}
	memory.Shrink(claim, messageBytes+int64(cap(m.Frames[2])))
	return c.push(&transport.Chunk{Messages: []transport.Message{*m}, Private: claim})
}

// push passes on a chunk.
func (c *call) push(chunk *transport.Chunk) error {
	if c.receiver.Push(chunk) {
		return nil
	}
	return transport.ErrInterrupted
}

// message returns the message of a response; nil if it has none. The error is why the call cannot go on.
func (c *call) message(response []byte) (*transport.Message, error) {
	converter, err := c.takeConverter()
	if err != nil {
		return nil, err
	}
	defer c.returnConverter(converter)
	h, err := c.protocol.read(response)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: a response is malformed: %w", transport.ErrLost, err)
	case h.ended != nil:
		return nil, h.ended
	case h.ignored, h.rank != c.rank && (!c.reportsForeign || slices.Contains(c.ranks, h.rank)):
		return nil, nil
	}
	m := &transport.Message{Conn: 1, Foreign: h.rank != c.rank, Partial: h.begins && h.partial}
	m.Frames = [][]byte{nil, binary.BigEndian.AppendUint64(nil, h.seq), nil}
	if !m.Foreign {
		m.Frames[2], _ = converter.convert(h, response) // without decoding, the batch is reported as lost
	}
	m.Count = len(m.Frames)
	return m, nil
}

// codec passes encoded messages.
type codec struct{}

func (codec) Name() string { return "proto" }

func (codec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(v.([]byte))}, nil
}

func (codec) Unmarshal(data mem.BufferSlice, v any) error {
	to := v.(*[]byte)
	n := data.Len()
	*to = slices.Grow((*to)[:0], n)[:n]
	if *to == nil {
		*to = []byte{} // an empty response is one
	}
	data.CopyTo(*to)
	return nil
}
