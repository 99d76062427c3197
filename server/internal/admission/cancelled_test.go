package admission

import (
	"context"
	"errors"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
)

// rawCodec passes messages that are encoded, and received ones to nobody.
type rawCodec struct{}

func (rawCodec) Marshal(m any) (mem.BufferSlice, error)   { return m.(mem.BufferSlice), nil }
func (rawCodec) Unmarshal(_ mem.BufferSlice, _ any) error { return nil }
func (rawCodec) Name() string                             { return "raw" }

// serveTracked starts a server and returns a connection to it. Its streams send messages, or answers to requests, until they are cancelled.
func serveTracked(t *testing.T, u *Unread, ended *sync.WaitGroup) *grpc.ClientConn {
	t.Helper()
	all := NewConnections(NewQuota(promauto.With(nil), "connections", 10, 10), u, false, nil)
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	receiving := NewReceiving(time.Minute, promauto.With(nil).NewCounter(prometheus.CounterOpts{}), nil)
	handler := func(_ any, stream grpc.ServerStream) error {
		defer ended.Done()
		if method, _ := grpc.Method(stream.Context()); method == "/test/Answers" {
			return sendAnswers(u, stream)
		}
		var sent Sent
		for {
			if err := stream.SendMsg(sent.Track(mem.BufferSlice{mem.SliceBuffer("message")})); err != nil {
				u.End(stream.Context(), &sent, err)
				return err
			}
		}
	}
	s := grpc.NewServer(grpc.ForceServerCodecV2(rawCodec{}), grpc.UnknownServiceHandler(handler), grpc.InTapHandle(receiving.Admit), grpc.StatsHandler(receiving))
	go func() { _ = s.Serve(all.Listener(l)) }()
	t.Cleanup(s.Stop)
	conn, err := grpc.NewClient(l.Addr().String(),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.ForceCodecV2(rawCodec{})))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// sendAnswers sends an answer for each request.
func sendAnswers(u *Unread, stream grpc.ServerStream) error {
	for {
		if err := stream.RecvMsg(nil); err != nil {
			return err
		}
		a, err := u.Begin(stream.Context())
		if err != nil {
			return err
		}
		b, err := a.Encode(1, func(b []byte) []byte { return append(b, 1) })
		if err != nil {
			return err
		}
		if err := stream.SendMsg(b); err != nil {
			return err
		}
	}
}

// TestCancelledStreamsAreNotUnread cancels streams while they send: gRPC drops some of their messages without a word, which must not count as
// answers that the client does not read.
func TestCancelledStreamsAreNotUnread(t *testing.T) {
	for method, n := range map[string]int{"/test/Messages": 100, "/test/Answers": 5000} {
		t.Run(method, func(t *testing.T) {
			t.Parallel()
			var stalled atomic.Bool
			u := NewUnread(10*time.Second, func(net.Addr) { stalled.Store(true) })
			var ended sync.WaitGroup
			conn := serveTracked(t, u, &ended)
			for range n {
				ended.Add(1)
				ctx, cancel := context.WithCancel(t.Context())
				stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
				if err != nil {
					t.Fatal(err)
				}
				for range 3 {
					if err := stream.SendMsg(mem.BufferSlice{}); err != nil {
						t.Fatal(err)
					}
				}
				for range 2 {
					if err := stream.RecvMsg(nil); err != nil {
						t.Fatal(err, "; the connection counts as one that is not read: ", stalled.Load())
					}
				}
				cancel()
				ended.Wait()
			}
			for u.Total().Used() > 0 { // the test's timeout ends it
				runtime.GC()
			}
			if stalled.Load() {
				t.Error("the connection was closed as one that is not read")
			}
		})
	}
}

// setWriting makes a connection look as if a write was in progress, or none.
func setWriting(c *connection, writing bool) {
	if c.writing() != writing {
		c.edges.Add(1)
	}
}

var errRevoked = errors.New("revoked")

// endedContexts are contexts of calls that have ended.
func endedContexts(ctx context.Context) (canceled, late, revoked context.Context) {
	canceled, cancel := context.WithCancel(ctx)
	cancel()
	late, expire := context.WithDeadline(ctx, time.Unix(0, 0))
	expire()
	revoked, revoke := context.WithCancelCause(ctx)
	revoke(errRevoked)
	return canceled, late, revoked
}

// TestMemoryOfEndedStreams has streams that end with a message that gRPC has not written, and may drop without a word.
func TestMemoryOfEndedStreams(t *testing.T) {
	t.Parallel()
	canceled, late, revoked := endedContexts(t.Context())
	for name, test := range map[string]struct {
		ctx          context.Context
		err          error
		writing      bool
		used, unread int64 // until gRPC drops the message
	}{
		"canceled":                    {ctx: canceled},
		"canceled a moment before":    {ctx: t.Context(), err: status.Error(codes.Canceled, "canceled")},
		"canceled during a write":     {ctx: canceled, writing: true, used: streamBytes},
		"late":                        {ctx: late, used: streamBytes},
		"late during a write":         {ctx: late, writing: true, used: streamBytes},
		"ended by the server":         {ctx: t.Context(), used: streamBytes, unread: streamBytes},
		"canceled by the server":      {ctx: revoked, err: status.Error(codes.Canceled, "canceled"), used: streamBytes, unread: streamBytes},
		"revoked, and not read":       {ctx: revoked, err: errRevoked, used: streamBytes, unread: streamBytes},
		"ended, and a write proceeds": {ctx: t.Context(), writing: true, used: streamBytes, unread: streamBytes},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u, c, _ := newUnread(t)
			setWriting(c, test.writing)
			sent := new(Sent)
			message := sent.Track(nil)
			u.End(peer.NewContext(test.ctx, &peer.Peer{Addr: c.RemoteAddr()}), sent, test.err)
			if used := u.Total().Used(); used != test.used || c.unread.bytes != test.unread {
				t.Errorf("%d bytes are in use, of which %d not read; want %d and %d", used, c.unread.bytes, test.used, test.unread)
			}
			if test.unread > 0 {
				message.Free() // while the stream is still referenced
			}
			runtime.KeepAlive(sent)
			for u.Total().Used() > 0 { // the test's timeout ends it
				runtime.GC()
			}
		})
	}
}

// TestMemoryOfEndedCalls has calls that ended before gRPC took their answers, which it may drop without a word.
func TestMemoryOfEndedCalls(t *testing.T) {
	t.Parallel()
	canceled, late, revoked := endedContexts(t.Context())
	receiving := NewReceiving(time.Minute, nil, nil)
	for name, test := range map[string]struct {
		ctx          context.Context
		event        stats.RPCStats
		writing      bool
		ended        bool  // before, by the server
		used, unread int64 // until gRPC drops the answer
	}{
		"canceled":                {ctx: canceled, event: &stats.OutPayload{}},
		"canceled during a write": {ctx: canceled, event: &stats.OutPayload{}, writing: true, used: callBytes},
		"late":                    {ctx: late, event: &stats.OutPayload{}, used: callBytes},
		"canceled by the server":  {ctx: revoked, event: &stats.OutPayload{}, used: callBytes, unread: callBytes},
		"ended by the server":     {ctx: canceled, event: &stats.OutPayload{}, ended: true, used: callBytes, unread: callBytes},
		"not ended":               {ctx: t.Context(), event: &stats.OutPayload{}, used: callBytes, unread: callBytes},
		"taken before":            {ctx: canceled, event: &stats.End{}, used: callBytes, unread: callBytes},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u, c, _ := newUnread(t)
			setWriting(c, test.writing)
			call := new(receivedCall)
			ctx := context.WithValue(peer.NewContext(test.ctx, &peer.Peer{Addr: c.RemoteAddr()}), receivedKey{}, call)
			if test.ended {
				u.End(context.WithValue(peer.NewContext(t.Context(), &peer.Peer{Addr: c.RemoteAddr()}), receivedKey{}, call), new(Sent), nil)
			}
			a, err := u.Begin(ctx)
			if err != nil {
				t.Fatal(err)
			}
			message, err := a.Encode(1, func(b []byte) []byte { return append(b, 1) })
			if err != nil {
				t.Fatal(err)
			}
			receiving.HandleRPC(ctx, test.event)
			if used := u.Total().Used(); used != test.used || c.unread.bytes != test.unread {
				t.Errorf("%d bytes are in use, of which %d not read; want %d and %d", used, c.unread.bytes, test.used, test.unread)
			}
			message.Free() // which gRPC does not always
			if c.unread.bytes != 0 || test.unread > 0 && u.Total().Used() != 0 {
				t.Errorf("%d bytes are in use, of which %d not read, after the answer was written", u.Total().Used(), c.unread.bytes)
			}
			runtime.KeepAlive(ctx)
			for u.Total().Used() > 0 { // the test's timeout ends it
				runtime.GC()
			}
		})
	}
}

// TestCancelledStreamsBesideABlockedWriteWait cancels streams of a connection that its client does not read until there is no room for more: one waits.
func TestCancelledStreamsBesideABlockedWriteWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u, c, tcp := newUnread(t)
		canceled, cancel := context.WithCancel(peer.NewContext(t.Context(), &peer.Peer{Addr: c.RemoteAddr()}))
		cancel()
		setWriting(c, true)
		var all [maxUnreadBytesPerAddress/streamBytes + 2]Sent
		for i := range len(all) - 2 {
			all[i].Track(nil)
			u.End(canceled, &all[i], nil)
		}
		began := time.Now()
		all[len(all)-2].Track(nil)
		u.End(canceled, &all[len(all)-2], nil)
		if took := time.Since(began); took != u.timeout {
			t.Errorf("a stream without room ended after %v, want %v", took, u.timeout)
		}
		<-tcp.closed
		setWriting(c, false)
		all[len(all)-1].Track(nil)
		u.End(canceled, &all[len(all)-1], nil)
		if took := time.Since(began); took > u.timeout*17/16 {
			t.Errorf("a stream of a connection that is closed ended after %v, want at most %v more", took-u.timeout, u.timeout/16)
		}
		runtime.KeepAlive(&all)
	})
}

// TestBlockedConnectionsWithCancelledStreamsAreClosed cancels a stream while a write is in progress, which then blocks, or proceeds a few times first.
func TestBlockedConnectionsWithCancelledStreamsAreClosed(t *testing.T) {
	for _, writes := range []int{0, 3} {
		synctest.Test(t, func(t *testing.T) {
			u, c, tcp := newUnread(t)
			canceled, cancel := context.WithCancel(peer.NewContext(t.Context(), &peer.Peer{Addr: c.RemoteAddr()}))
			cancel()
			sent := new(Sent)
			sent.Track(nil)
			setWriting(c, true)
			u.End(canceled, sent, nil)
			for range writes {
				time.Sleep(u.timeout - time.Second)
				setWriting(c, false)
				setWriting(c, true)
			}
			began := time.Now()
			<-tcp.closed
			if took := time.Since(began); took < u.timeout || took > 2*u.timeout {
				t.Errorf("the connection was closed %v after its last write began, want one to two times %v", took, u.timeout)
			}
		})
	}
}

// TestConnectionsThatProceedStayOpen cancels a stream during each of some writes, of which none blocks for long.
func TestConnectionsThatProceedStayOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u, c, tcp := newUnread(t)
		canceled, cancel := context.WithCancel(peer.NewContext(t.Context(), &peer.Peer{Addr: c.RemoteAddr()}))
		cancel()
		for range 20 {
			sent := new(Sent)
			sent.Track(nil)
			setWriting(c, true)
			u.End(canceled, sent, nil)
			time.Sleep(u.timeout - time.Second)
			setWriting(c, false)
		}
		select {
		case <-tcp.closed:
			t.Error("the connection was closed")
		case <-time.After(2 * u.timeout):
		}
		if c.watched.Load() {
			t.Error("a connection without a write is still watched")
		}
	})
}

// TestLateRequestsEndByTheServer has a call whose request is not received in time. The server has ended it then, and not its client.
func TestLateRequestsEndByTheServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, c, _ := newUnread(t)
		s := NewReceiving(time.Minute, promauto.With(nil).NewCounter(prometheus.CounterOpts{}), nil)
		ctx, err := s.Admit(peer.NewContext(t.Context(), &peer.Peer{Addr: c.RemoteAddr()}), nil)
		if err != nil {
			t.Fatal(err)
		}
		s.TagRPC(ctx, nil)
		<-ctx.Done()
		if cause := endCause(ctx, status.FromContextError(ctx.Err()).Err()); cause != nil {
			t.Errorf("the call was ended because of %v, want by the server", cause)
		}
	})
}
