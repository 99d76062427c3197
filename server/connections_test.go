package server_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/server/access"
	"github.com/kvcast/kvcast/test/checker"
	"github.com/kvcast/kvcast/test/harness"
)

// connect opens a connection from a local address, and sends nothing. It returns the HTTP/2 settings that the server
// sends; nil if the server refuses the connection.
func (h *fixture) connect(from string) (net.Conn, map[uint16]uint32) {
	h.t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.DialContext(h.t.Context(), "tcp", h.conn.Target())
	if err != nil {
		h.t.Skipf("this machine has no address %s: %v", from, err)
	}
	h.t.Cleanup(func() { _ = c.Close() })
	return c, readSettings(h.t, c)
}

// readSettings reads the first frame of an HTTP/2 server. It returns nil if the server closes the connection.
func readSettings(t testing.TB, c net.Conn) map[uint16]uint32 {
	t.Helper()
	head := make([]byte, 9)
	if _, err := io.ReadFull(c, head); err != nil {
		return nil
	}
	body := make([]byte, int(head[0])<<16|int(head[1])<<8|int(head[2]))
	if _, err := io.ReadFull(c, body); err != nil || head[3] != 4 {
		t.Fatalf("frame %v, %v, want settings", head, err)
	}
	all := make(map[uint16]uint32)
	for ; len(body) > 0; body = body[6:] {
		all[binary.BigEndian.Uint16(body)] = binary.BigEndian.Uint32(body[2:])
	}
	return all
}

// TestConnectionsPerAddressAreLimited opens connections from the address of a subscriber and
// from another one.
func TestConnectionsPerAddressAreLimited(t *testing.T) {
	t.Parallel()
	var log syncBuffer
	reg := prometheus.NewRegistry()
	h := overTCP(t, server.Config{Limits: server.Limits{MaxConnectionsPerAddress: 3}, Registerer: reg, Logger: slog.New(slog.NewTextHandler(&log, nil))}, journal.Config{})
	h.addWorker()
	s := h.subscribe(checker.New(checker.Options{}), earliest())
	s.until(t, 1)
	first, settings := h.connect("127.0.0.1")
	if settings == nil {
		t.Fatal("the second connection is refused")
	}
	if _, settings := h.connect("127.0.0.1"); settings == nil {
		t.Fatal("the third connection is refused")
	}
	if _, settings := h.connect("127.0.0.1"); settings != nil {
		t.Error("the fourth connection is accepted")
	}
	if got := harness.Gather(t, reg).Value(t, "kvcast_server_address_refused_total", "resource", "connections"); got != 1 {
		t.Errorf("address_refused_total: got %v, want 1", got)
	}
	if says := `msg="refused connection" peer.address=127.0.0.1:`; !strings.Contains(log.String(), says) {
		t.Errorf("no %q in the log:\n%s", says, log.String())
	}
	h.fill(100)
	s.until(t, 101)
	_ = first.Close()
	for { // the server has not read the end of the first connection yet
		if _, settings := h.connect("127.0.0.1"); settings != nil {
			break
		}
	}
	if _, settings := h.connect("127.0.0.2"); settings == nil {
		t.Error("a connection from another address is refused")
	}
}

// TestConnectionsWithoutCredentialsHaveAPart opens connections without a permitted call: a further one takes the place of the oldest of the address
// with the most. Those of clients with a token stay open.
func TestConnectionsWithoutCredentialsHaveAPart(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{Limits: server.Limits{MaxConnections: 12}, Access: access.List{Tokens: tokens(t)}}, journal.Config{})
	h.addWorker()
	h.client = kvcastv1.NewRouterEventServiceClient(h.as("Bearer " + routersToken))
	s := h.subscribe(checker.New(checker.Options{}), earliest())
	s.until(t, 1)
	closed := func(c net.Conn) {
		t.Helper()
		if err := c.SetReadDeadline(time.Now().Add(harness.Timeout)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("the connection is not closed")
		}
	}
	var open []net.Conn
	for _, from := range []string{"127.0.0.2", "127.0.0.3", "127.0.0.3", "127.0.0.4", "127.0.0.4"} {
		c, settings := h.connect(from)
		if settings == nil {
			t.Fatalf("a connection from %s is refused", from)
		}
		open = append(open, c)
	}
	closed(open[1]) // in place of which the fourth was accepted
	closed(open[3]) // the fifth: both addresses had two
	h.fill(10)
	s.until(t, 11)
	if err := open[0].SetReadDeadline(time.Now().Add(time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, open[0]); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the connection of an address with one: got %v, want that it is open", err)
	}
}

// TestConnectionsAreLimitedInTotal opens connections from two addresses.
func TestConnectionsAreLimitedInTotal(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	h := overTCP(t, server.Config{Limits: server.Limits{MaxConnections: 2}, Registerer: reg}, journal.Config{})
	h.addWorker()
	s := h.subscribe(checker.New(checker.Options{}), earliest())
	s.until(t, 1)
	if _, settings := h.connect("127.0.0.2"); settings == nil {
		t.Fatal("the second connection is refused")
	}
	for _, from := range []string{"127.0.0.1", "127.0.0.2", "127.0.0.3"} {
		if _, settings := h.connect(from); settings != nil {
			t.Errorf("the third connection, from %s, is accepted", from)
		}
	}
	if used, refused := harness.Gather(t, reg).Value(t, "kvcast_budget_used", "resource", "connections"), harness.Gather(t, reg).Value(t, "kvcast_budget_refused_total", "resource", "connections"); used != 2 || refused != 3 {
		t.Errorf("%v used, %v refused, want 2 and 3", used, refused)
	}
	h.fill(100)
	s.until(t, 101)
}

// TestSilentConnectionsAreClosed fills the connection limit with connections that send nothing.
func TestSilentConnectionsAreClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := bufconn.Listen(1 << 20)
		h := start(t, harness.InstanceConfig{Server: server.Config{Limits: server.Limits{MaxConnections: 3}}, Listener: l})
		h.addWorker()
		for range 3 {
			c, err := l.DialContext(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = c.Close() }()
			if readSettings(t, c) == nil {
				t.Fatal("a connection is refused")
			}
		}
		began := time.Now()
		for {
			stream, err := h.client.Subscribe(t.Context(), earliest(), grpc.WaitForReady(true))
			if err == nil {
				_, err = stream.Recv()
			}
			if err == nil {
				break
			}
		}
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("a client was accepted after %v, want at most a few seconds more than 5s", took)
		}
	})
}

// TestConnectionsAnnounceTheirLimits reads the settings that clients receive.
func TestConnectionsAnnounceTheirLimits(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{Limits: server.Limits{MaxSubscribers: 10, MaxConnections: 7}}, journal.Config{})
	_, got := h.connect("127.0.0.1")
	const maxConcurrentStreams, maxHeaderListSize = 3, 6
	if got[maxConcurrentStreams] != 155 || got[maxHeaderListSize] != 16<<10 {
		t.Errorf("settings: got %v, want 155 streams and headers of 16 KiB", got)
	}
	// A client that obeys the limit fails the call itself.
	ctx := metadata.AppendToOutgoingContext(t.Context(), "a", strings.Repeat("a", 17<<10))
	if _, err := healthv1.NewHealthClient(h.conn).Check(ctx, &healthv1.HealthCheckRequest{}); status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "header list size") {
		t.Errorf("large headers: got %v", err)
	}
}

// TestLargeHeadersAreRefused uses a client that ignores the announced limit.
func TestLargeHeadersAreRefused(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	c, first := h.connect("127.0.0.1")
	if first == nil {
		t.Fatal("the connection is refused")
	}
	frame := func(kind, flags byte, stream uint32, body []byte) []byte {
		head := []byte{byte(len(body) >> 16), byte(len(body) >> 8), byte(len(body)), kind, flags}
		return append(binary.BigEndian.AppendUint32(head, stream), body...)
	}
	literal := func(name, value string) []byte { // without Huffman coding or indexing
		b := append([]byte{0, byte(len(name))}, name...)
		return append(append(b, byte(len(value))), value...)
	}
	fields := bytes.Join([][]byte{literal(":method", "POST"), literal(":scheme", "http"), literal(":path", "/grpc.health.v1.Health/Watch"), literal("content-type", "application/grpc")}, nil)
	for range 200 {
		fields = append(fields, literal("a", strings.Repeat("a", 100))...)
	}
	const data, headers, rst, settings, continuation, endHeaders = 0, 1, 3, 4, 9, 4
	request := []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	request = append(request, frame(settings, 0, 0, nil)...)
	request = append(request, frame(headers, 0, 1, fields[:16<<10])...)
	request = append(request, frame(continuation, endHeaders, 1, fields[16<<10:])...)
	if _, err := c.Write(request); err != nil {
		t.Fatal(err)
	}
	for {
		head := make([]byte, 9)
		if _, err := io.ReadFull(c, head); err != nil {
			return // the server has closed the connection
		}
		if _, err := io.CopyN(io.Discard, c, int64(head[0])<<16|int64(head[1])<<8|int64(head[2])); err != nil {
			return
		}
		switch head[3] {
		case rst:
			return
		case data, headers:
			t.Fatal("the call was answered")
		}
	}
}

// TestHealthWatchesAreLimited opens one health watch more than one address may have.
func TestHealthWatchesAreLimited(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	h := overTCP(t, server.Config{Limits: server.Limits{MaxConnectionsPerAddress: 2}, Registerer: reg, Access: access.List{Tokens: tokens(t)}}, journal.Config{})
	health := healthv1.NewHealthClient(h.conn)
	watch := func(ctx context.Context) (healthv1.Health_WatchClient, error) {
		stream, err := health.Watch(ctx, &healthv1.HealthCheckRequest{})
		if err == nil {
			_, err = stream.Recv()
		}
		return stream, err
	}
	first, err := watch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, leave := context.WithCancel(t.Context())
	if _, err = watch(ctx); err != nil {
		t.Fatal(err)
	}
	_, err = watch(t.Context())
	wantStatus(t, err, codes.ResourceExhausted, "TOO_MANY_STREAMS")
	if got := harness.Gather(t, reg).Value(t, "kvcast_server_address_refused_total", "resource", "health_watches"); got != 1 {
		t.Errorf("address_refused_total: got %v, want 1", got)
	}
	if _, err := health.Check(t.Context(), &healthv1.HealthCheckRequest{}); err != nil {
		t.Errorf("health check: %v", err)
	}
	leave()
	for _, err = watch(t.Context()); err != nil; _, err = watch(t.Context()) {
		wantStatus(t, err, codes.ResourceExhausted, "TOO_MANY_STREAMS")
	}
	h.Server.StopServing()
	if m, err := first.Recv(); err != nil || m.GetStatus() != healthv1.HealthCheckResponse_NOT_SERVING {
		t.Errorf("the first watch: got %v, %v", m, err)
	}
}

// TestWatchRefusesLongName watches a service with a name that is longer than allowed.
func TestWatchRefusesLongName(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	stream, err := healthv1.NewHealthClient(h.conn).Watch(t.Context(), &healthv1.HealthCheckRequest{Service: strings.Repeat("s", 257)})
	if err := firstError(t, err, stream.Recv); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "at most 256") {
		t.Errorf("got %v", err)
	}
}

func TestReflectionStreamsAreLimited(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{Access: access.List{Tokens: tokens(t)}}, journal.Config{})
	client := reflectionv1.NewServerReflectionClient(h.conn)
	ask := func() error {
		stream, err := client.ServerReflectionInfo(t.Context())
		if err != nil {
			return err
		}
		// Send fails once the stream has ended; Recv returns the reason.
		if err := stream.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}}); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		_, err = stream.Recv()
		return err
	}
	for n := range 16 {
		if err := ask(); err != nil {
			t.Fatalf("stream %d: %v", n, err)
		}
	}
	wantStatus(t, ask(), codes.ResourceExhausted, "TOO_MANY_STREAMS")
}

// TestRequestsMayFollowTheHeadersOfManyCalls starts more calls over one connection than the server receives concurrently, and
// sends their requests later, the last call's first. Of health checks any number may run: queries of a kind are limited.
func TestRequestsMayFollowTheHeadersOfManyCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := inMemory(t, server.Config{}, journal.Config{})
		const calls = 500
		began := time.Now()
		streams := make([]grpc.ClientStream, calls)
		for i := range streams {
			var err error
			if streams[i], err = h.conn.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true}, healthv1.Health_Check_FullMethodName); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		// The first calls are being received; all others wait, and their requests are sent before those of the first.
		for _, stream := range slices.Backward(streams) {
			if err := errors.Join(stream.SendMsg(&healthv1.HealthCheckRequest{}), stream.CloseSend()); err != nil {
				t.Fatal(err)
			}
		}
		for _, stream := range streams {
			if err := stream.RecvMsg(new(healthv1.HealthCheckResponse)); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(began); took > 0 {
			t.Errorf("took %v, want no time: no call waits until another one times out", took)
		}
	})
}

// TestIncompleteRequestsTimeOut starts more calls without a request than the server receives concurrently, and then
// a call with a request.
func TestIncompleteRequestsTimeOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg := prometheus.NewRegistry()
		h := inMemory(t, server.Config{Registerer: reg, Access: access.List{Tokens: tokens(t)}}, journal.Config{})
		const calls, most = 100, 32 // most is the limit per connection
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		ended := make(chan error, calls)
		for n := range calls {
			method := []string{healthv1.Health_Check_FullMethodName, healthv1.Health_Watch_FullMethodName, kvcastv1.RouterEventService_GetStatus_FullMethodName}[n%3]
			stream, err := h.conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true}, method)
			if err != nil {
				t.Fatal(err)
			}
			go func() { ended <- stream.RecvMsg(new(healthv1.HealthCheckResponse)) }()
		}
		synctest.Wait()
		if got := harness.Gather(t, reg).Value(t, "kvcast_server_receiving_requests"); got != most {
			t.Errorf("receiving_requests: got %v, want %d", got, most)
		}
		began := time.Now()
		if _, err := healthv1.NewHealthClient(h.conn).Check(ctx, &healthv1.HealthCheckRequest{}); err != nil {
			t.Errorf("the complete request: %v", err)
		}
		if took := time.Since(began); took > 16*time.Second {
			t.Errorf("the complete request was answered after %v", took)
		}
		for range calls {
			if err := <-ended; status.Code(err) != codes.Canceled {
				t.Errorf("an incomplete request: got %v", err)
			}
		}
		synctest.Wait()
		if got := harness.Gather(t, reg).Value(t, "kvcast_server_receiving_requests"); got != 0 {
			t.Errorf("receiving_requests: got %v, want 0", got)
		}
		if got := harness.Gather(t, reg).Value(t, "kvcast_server_late_requests_total"); got != calls {
			t.Errorf("late_requests_total: got %v, want %d", got, calls)
		}
	})
}

// TestSubscribersPerAddressReachTheLimit opens the maximum number of subscribers from one address: over separate
// connections with a health watch each, as behind a NAT, and over one connection, as behind a proxy.
func TestSubscribersPerAddressReachTheLimit(t *testing.T) {
	testclass.WithoutRace(t)
	for _, name := range []string{"of their own", "of a proxy"} {
		t.Run("over connections "+name, func(t *testing.T) {
			l := bufconn.Listen(64 << 10)
			h := start(t, harness.InstanceConfig{Listener: l, Server: server.Config{
				Limits: server.Limits{MaxConnectionsPerAddress: 2 * server.DefaultMaxSubscribers},
			}})
			h.addWorker()
			for n := range server.DefaultMaxSubscribers {
				conn := h.conn
				if name == "of their own" {
					conn = h.Dial(t)
				}
				stream, err := kvcastv1.NewRouterEventServiceClient(conn).Subscribe(t.Context(), earliest())
				if err == nil {
					_, err = stream.Recv()
				}
				if err != nil {
					t.Fatalf("subscriber %d: %v", n, err)
				}
				watch, err := healthv1.NewHealthClient(conn).Watch(t.Context(), &healthv1.HealthCheckRequest{})
				if err == nil {
					_, err = watch.Recv()
				}
				if err != nil {
					t.Fatalf("watch %d: %v", n, err)
				}
			}
		})
	}
}
