package admission

import (
	"context"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
)

// rawCodec passes messages that are encoded, and received ones to nobody.
type rawCodec struct{}

func (rawCodec) Marshal(m any) (mem.BufferSlice, error)   { return m.(mem.BufferSlice), nil }
func (rawCodec) Unmarshal(_ mem.BufferSlice, _ any) error { return nil }
func (rawCodec) Name() string                             { return "raw" }

// serveTracked serves streams that send messages until they are cancelled, and returns a client of it.
func serveTracked(t *testing.T, u *Unread, ended *sync.WaitGroup) *grpc.ClientConn {
	t.Helper()
	all := NewConnections(NewQuota(promauto.With(nil), "connections", 10, 10), u, false, nil)
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(grpc.ForceServerCodecV2(rawCodec{}), grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		defer ended.Done()
		var sent Sent
		for {
			if err := stream.SendMsg(sent.Track(mem.BufferSlice{mem.SliceBuffer("message")})); err != nil {
				u.End(stream.Context(), &sent, err)
				return err
			}
		}
	}))
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

// TestCancelledStreamsAreNotUnread cancels streams while they send: gRPC drops some of their messages without a word, which must not count as
// answers that the client does not read.
func TestCancelledStreamsAreNotUnread(t *testing.T) {
	var stalled atomic.Bool
	u := NewUnread(time.Millisecond, func(net.Addr) { stalled.Store(true) })
	var ended sync.WaitGroup
	conn := serveTracked(t, u, &ended)
	for range 100 {
		ended.Add(1)
		ctx, cancel := context.WithCancel(t.Context())
		stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, "/test/Messages")
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
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
}
