// Package lmcachezmq calls LMCache's multiprocess server over ZeroMQ, its default transport, as if it were called by gRPC.
//
// In: encoded requests of the services that package lmcachev1 describes. Out: encoded responses. So all that knows what a response means is the same for both
// transports. The protocol is that of lmcache 0.5.6 (lmcache/v1/multiprocess/transport/zmq_impl): a request is a message of an identifier, an operation, and
// each argument, in MessagePack; a response has the identifier, the operation and the result. A stream has a response for each message that acknowledges the one
// before, and ends with a response without a result. An operation that the server does not know gets no response.
//
// Whatever a server sends, a message has at most zmtp.DefaultBytes, and a response is not longer than it.
package lmcachezmq

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tinylib/msgp/msgp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/zmtp"
)

const (
	// greetTimeout is how long a server may take to begin with its greeting. Servers of either transport send the first bytes at once.
	greetTimeout = 2 * time.Second
	// writeTimeout bounds the writing of a request.
	writeTimeout = 5 * time.Second
	// keptBytes is how much memory for messages a connection keeps from one to the next.
	keptBytes = 64 << 10
	// messageFrames are the frames of a response: identifier, operation, result.
	messageFrames = 3
	// pingOperation is what the operation "ping" is in a request.
	pingOperation = 22
)

// The frames that control a stream, after its identifier.
var (
	acknowledge = [][]byte{nil, []byte("ack")}
	cancel      = [][]byte{nil, []byte("cancel")}
)

// Conn is a connection to a server. It has one stream at a time. Only Invoke is safe for concurrent use.
type Conn struct {
	net     net.Conn
	session *zmtp.Session
	event   zmtp.Event
	in      []byte // what was read
	decoded int    // bytes of in

	sending sync.Mutex // held while bytes are written
	calls   atomic.Int64
	stream  *stream // the newest one
	others  int64   // messages that are not of the newest stream
}

// Greets reports whether the server of a connection begins as one of ZeroMQ does, and returns a connection from which what was read can be read
// again. A server that sends nothing for some time does not.
func Greets(n net.Conn) (net.Conn, bool) {
	first := make([]byte, 1)
	_ = n.SetReadDeadline(time.Now().Add(greetTimeout)) // fails if the connection has ended: then Read fails, too
	_, err := io.ReadFull(n, first)
	_ = n.SetReadDeadline(time.Time{})
	return &greeted{n, first}, err == nil && zmtp.CheckGreeting(first) == nil
}

// greeted is a connection of which the first bytes were read.
type greeted struct {
	net.Conn
	first []byte
}

func (g *greeted) Read(b []byte) (int, error) {
	if len(g.first) == 0 {
		return g.Conn.Read(b)
	}
	n := copy(b, g.first)
	g.first = g.first[n:]
	return n, nil
}

// New returns a Conn over a connection, which Close closes.
func New(n net.Conn) *Conn {
	return &Conn{net: n, session: zmtp.New(zmtp.Config{Socket: zmtp.DEALER}, time.Now())}
}

// Close ends the stream, and closes the connection.
func (c *Conn) Close() error {
	if c.stream != nil {
		_ = c.send(c.stream.id, cancel...) // so that the server ends it at once
	}
	return c.net.Close()
}

// Invoke sends a PingRequest. It does not wait for the response.
func (c *Conn) Invoke(_ context.Context, _ string, request, _ any, _ ...grpc.CallOption) error {
	instance, err := readPing(request.([]byte))
	if err != nil {
		return err
	}
	return c.send(c.calls.Add(1), msgp.AppendInt64(nil, pingOperation), msgp.AppendInt64(nil, instance))
}

// NewStream returns a stream of subscribe_kv_events. It ends the one before.
func (c *Conn) NewStream(ctx context.Context, _ *grpc.StreamDesc, _ string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	if c.stream != nil {
		if err := c.send(c.stream.id, cancel...); err != nil {
			return nil, err
		}
	}
	c.stream = &stream{ctx: ctx, conn: c, id: c.calls.Add(1)}
	return c.stream, nil
}

// stream is a call of subscribe_kv_events.
type stream struct {
	ctx  context.Context
	conn *Conn
	id   int64
	// first is the first response; nil if it was returned.
	first []byte
	ended error // why there are no more responses; nil if there may be
}

// SendMsg sends a SubscribeKvEventsRequest, and waits for the first response, which servers send at once: one that does not know the
// operation sends none.
func (s *stream) SendMsg(request any) error {
	arguments, err := readSubscribe(request.([]byte))
	if err != nil {
		return err
	}
	stop := s.watch()
	defer stop()
	for !s.conn.session.Established() {
		if err := s.conn.next(); err != nil {
			return err
		}
	}
	if err := s.conn.send(s.id, append([][]byte{msgp.AppendString(nil, "subscribe_kv_events")}, arguments...)...); err != nil {
		return err
	}
	s.first, s.ended = s.receive(nil)
	return s.ended
}

// RecvMsg receives a KVEventBatch into a *[]byte.
func (s *stream) RecvMsg(to any) error {
	response := to.(*[]byte)
	if s.first != nil {
		*response, s.first = s.first, nil
		return nil
	}
	if s.ended != nil {
		return s.ended
	}
	stop := s.watch()
	defer stop()
	if err := s.conn.send(s.id, acknowledge...); err != nil {
		return err
	}
	*response, s.ended = s.receive((*response)[:0])
	return s.ended
}

// watch closes the connection if the context ends before the function is called that it returns: that ends reads and writes.
func (s *stream) watch() (stop func() bool) {
	return context.AfterFunc(s.ctx, func() { _ = s.conn.net.Close() })
}

// receive waits for the next response of the stream, and appends it to dst. The error is io.EOF if the server has ended the stream.
func (s *stream) receive(dst []byte) ([]byte, error) {
	for {
		if err := s.conn.next(); err != nil {
			return nil, err
		}
		e := &s.conn.event
		if e.Kind != zmtp.Message {
			continue
		}
		if id, _, err := msgp.ReadInt64Bytes(e.Frames[0]); err != nil || id != s.id { // of a ping, or of the stream before, which may have a batch and an end
			if s.conn.others++; s.conn.others > 2*s.conn.calls.Load() {
				return nil, status.Error(codes.DataLoss, "the server sends responses to nothing")
			}
			continue
		}
		if e.Count < messageFrames {
			return nil, io.EOF
		}
		dst, err := appendBatch(dst, e.Frames[2])
		if err != nil {
			return nil, status.Errorf(codes.DataLoss, "a response is malformed: %v", err)
		}
		return dst, nil
	}
}

// Header, CloseSend, Trailer and Context implement grpc.ClientStream. A server that has sent a response has accepted the call.
func (*stream) Header() (metadata.MD, error) { return metadata.MD{}, nil }

func (*stream) CloseSend() error { return nil }

func (*stream) Trailer() metadata.MD { return nil }

func (s *stream) Context() context.Context { return s.ctx }

// unavailable is the error of a connection that has ended: another one may resume.
func unavailable(err error) error {
	if err == nil {
		return nil
	}
	return status.Errorf(codes.Unavailable, "LMCache's server over ZeroMQ: %v", err)
}

// next waits for the next event of the connection, which is valid until the next call.
func (c *Conn) next() error {
	for {
		n, err := c.session.Next(time.Now(), c.in[c.decoded:], &c.event)
		if err == nil {
			err = c.write(c.session.Out())
		}
		if err != nil {
			return unavailable(err)
		}
		c.decoded += n
		switch c.event.Kind {
		case zmtp.Established, zmtp.Message:
			return nil
		case zmtp.Incomplete:
			if err := c.read(); err != nil {
				return unavailable(err)
			}
		default:
		}
	}
}

// read waits for bytes, which it appends to in.
func (c *Conn) read() error {
	kept := copy(c.in, c.in[c.decoded:])
	c.in, c.decoded = c.in[:kept], 0
	if need := c.session.Need(c.in); kept == cap(c.in) || need <= keptBytes && cap(c.in) > keptBytes {
		// The size that a server announces is not believed: memory grows with what arrives.
		in := make([]byte, 0, max(keptBytes, min(need, 2*kept)))
		c.in = append(in, c.in...)
	}
	for {
		if err := c.net.SetReadDeadline(c.session.Deadline()); err != nil {
			return err
		}
		n, err := c.net.Read(c.in[len(c.in):cap(c.in)])
		c.in = c.in[:len(c.in)+n]
		switch {
		case n > 0:
			return nil
		case !errors.Is(err, os.ErrDeadlineExceeded):
			return err
		}
		if err := c.session.Tick(time.Now()); err != nil {
			return err
		}
		if err := c.write(c.session.Out()); err != nil {
			return err
		}
	}
}

// send sends a message of an identifier and frames.
func (c *Conn) send(id int64, frames ...[]byte) error {
	return unavailable(c.write(zmtp.AppendMessage(nil, slices.Concat([][]byte{msgp.AppendInt64(nil, id)}, frames)...)))
}

func (c *Conn) write(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	c.sending.Lock()
	defer c.sending.Unlock()
	if err := c.net.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	if _, err := c.net.Write(b); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	return nil
}

var _ grpc.ClientConnInterface = (*Conn)(nil)
