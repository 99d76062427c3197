package lmcachezmq_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"
	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	lmcachev1 "github.com/kvcast/kvcast/internal/peer/lmcache/v1"
	"github.com/kvcast/kvcast/internal/transport/lmcachezmq"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/rawzmtp"
)

// encoded returns a value in MessagePack.
func encoded(t testing.TB, v any) []byte {
	t.Helper()
	b, err := msgp.AppendIntf(nil, v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// server is the other side of a connection.
type server struct {
	*rawzmtp.Conn
	t *testing.T
}

// connect returns a Conn and its server, which have not shaken hands yet: accept does that.
func connect(t *testing.T) (c *lmcachezmq.Conn, accept func() server) {
	t.Helper()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	n, err := net.Dial("tcp", l.Addr().String()) //nolint:noctx // to a listener of this process
	if err != nil {
		t.Fatal(err)
	}
	c = lmcachezmq.New(n)
	t.Cleanup(func() { _ = c.Close() })
	return c, func() server {
		peer, err := rawzmtp.Accept(l, zmtp.ROUTER, harness.Timeout)
		if err != nil {
			t.Error(err)
		} else {
			t.Cleanup(func() { _ = peer.Close() })
		}
		return server{peer, t}
	}
}

// want receives a message. It has a value for each frame, in MessagePack unless it is a []byte.
func (s server) want(want ...any) {
	frames, err := s.Receive(harness.Timeout)
	if err != nil {
		s.t.Error(err)
		return
	}
	for i, v := range want {
		b, raw := v.([]byte)
		if !raw {
			b = encoded(s.t, v)
		}
		if i >= len(frames) || !slices.Equal(frames[i], b) {
			s.t.Errorf("got the frames %x, want %v", frames, want)
			return
		}
	}
}

// send sends a message of values in MessagePack.
func (s server) send(values ...any) {
	var frames [][]byte
	for _, v := range values {
		frames = append(frames, encoded(s.t, v))
	}
	s.Message(frames...)
	if err := s.Flush(); err != nil {
		s.t.Error(err)
	}
}

const operation = "subscribe_kv_events"

// subscribe begins a stream after a cursor.
func subscribe(ctx context.Context, c *lmcachezmq.Conn, cursor int64) (interface{ RecvMsg(any) error }, error) {
	stream, err := c.NewStream(ctx, nil, "")
	if err != nil {
		return nil, err
	}
	request, err := proto.Marshal(&lmcachev1.SubscribeKvEventsRequest{InstanceId: 77, ModelName: "m", Cursor: cursor, MaxEvents: 64})
	if err != nil {
		return nil, err
	}
	return stream, stream.SendMsg(request)
}

// receive returns the next batch, as text.
func receive(stream interface{ RecvMsg(any) error }) (string, error) {
	var response []byte
	if err := stream.RecvMsg(&response); err != nil {
		return "", err
	}
	b := new(lmcachev1.KVEventBatch)
	if err := proto.Unmarshal(response, b); err != nil {
		return "", err
	}
	return prototext.MarshalOptions{}.Format(b), nil
}

func batch(next int, events ...any) map[string]any {
	return map[string]any{"enabled": true, "incarnation": 7, "next_cursor": next, "lost": false, "events": events, "added_later": map[string]any{"a": 1}}
}

func wantBatch(t *testing.T, stream interface{ RecvMsg(any) error }, want *lmcachev1.KVEventBatch) {
	t.Helper()
	want.Enabled, want.Incarnation = true, 7
	var response []byte
	if err := stream.RecvMsg(&response); err != nil {
		t.Fatal(err)
	}
	got := new(lmcachev1.KVEventBatch)
	if err := proto.Unmarshal(response, got); err != nil || !proto.Equal(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
}

// TestStream has a response of a ping between two batches, and a second stream over the same connection.
func TestStream(t *testing.T) {
	t.Parallel()
	c, accept := connect(t)
	served := make(chan struct{})
	go func() {
		defer close(served)
		s := accept()
		s.want(1, operation, 77, "m", 5, 64)
		s.send(1, operation, batch(5))
		s.want(2, 22, 77) // the ping, before the batch is acknowledged
		s.send(2, 22, true)
		s.want(1, []byte{}, []byte("ack"))
		s.send(1, operation, batch(9,
			map[string]any{
				"seq": 6, "kind": "stored", "medium": "CPU", "model_name": "m", "block_hashes": []any{[]byte("h1")}, "parent_block_hash": nil, "token_ids": []any{1, 70000},
			},
			map[string]any{"seq": 8, "kind": "removed", "block_hashes": []any{[]byte("h1"), []byte("h2")}, "parent_block_hash": []byte("p"), "token_ids": []any{}}))
		s.want(1, []byte{}, []byte("cancel"))
		s.want(3, operation, 77, "m", 0, 64)
		s.send(1, operation) // the end of the first stream
		s.send(3, operation, batch(2))
		s.want(3, []byte{}, []byte("ack"))
		s.send(3, operation)
	}()
	first, err := subscribe(t.Context(), c, 5)
	if err != nil {
		t.Fatal(err)
	}
	wantBatch(t, first, &lmcachev1.KVEventBatch{NextCursor: 5})
	instance := int64(77)
	ping, err := proto.Marshal(&lmcachev1.PingRequest{InstanceId: &instance})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Invoke(t.Context(), "", ping, nil); err != nil {
		t.Fatal(err)
	}
	wantBatch(t, first, &lmcachev1.KVEventBatch{NextCursor: 9, Events: []*lmcachev1.KVEventRecord{
		{Seq: 6, Kind: "stored", BlockHashes: [][]byte{[]byte("h1")}, TokenIds: []int64{1, 70000}},
		{Seq: 8, Kind: "removed", BlockHashes: [][]byte{[]byte("h1"), []byte("h2")}, ParentBlockHash: []byte("p")},
	}})
	second, err := subscribe(t.Context(), c, 0)
	if err != nil {
		t.Fatal(err)
	}
	wantBatch(t, second, &lmcachev1.KVEventBatch{NextCursor: 2})
	if _, err := receive(second); !errors.Is(err, io.EOF) {
		t.Errorf("after the end of the stream: got %v, want %v", err, io.EOF)
	}
	<-served
}

// TestLargeBatch has a batch of more than the memory that a connection keeps, between small ones.
func TestLargeBatch(t *testing.T) {
	t.Parallel()
	c, accept := connect(t)
	hashes := make([]any, 100_000)
	want := &lmcachev1.KVEventRecord{Seq: 1, Kind: "removed"}
	for i := range hashes {
		h := fmt.Appendf(nil, "%032d", i)
		hashes[i], want.BlockHashes = h, append(want.BlockHashes, h)
	}
	go func() {
		s := accept()
		s.want(1, operation)
		s.send(1, operation, batch(0))
		s.want(1, []byte{}, []byte("ack"))
		s.send(1, operation, batch(1, map[string]any{"seq": 1, "kind": "removed", "block_hashes": hashes}))
		s.want(1, []byte{}, []byte("ack"))
		s.send(1, operation, batch(2))
	}()
	stream, err := subscribe(t.Context(), c, 0)
	if err != nil {
		t.Fatal(err)
	}
	wantBatch(t, stream, &lmcachev1.KVEventBatch{})
	wantBatch(t, stream, &lmcachev1.KVEventBatch{NextCursor: 1, Events: []*lmcachev1.KVEventRecord{want}})
	wantBatch(t, stream, &lmcachev1.KVEventBatch{NextCursor: 2})
}

func TestErrors(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		answer func(server)
		want   codes.Code
	}{
		"no map":            {func(s server) { s.send(1, operation, 5) }, codes.DataLoss},
		"a seq is a text":   {func(s server) { s.send(1, operation, batch(1, map[string]any{"seq": "1"})) }, codes.DataLoss},
		"a token is less":   {func(s server) { s.send(1, operation, batch(1, map[string]any{"token_ids": []any{-1}})) }, codes.DataLoss},
		"unasked responses": {func(s server) { s.send(9); s.send(9, 22, true); s.send("x") }, codes.DataLoss},
		"the server ends":   {func(s server) { _ = s.Close() }, codes.Unavailable},
		"a frame of 9 MiB":  {func(s server) { s.More(make([]byte, 9<<20)); _ = s.Flush() }, codes.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, accept := connect(t)
			go func() {
				s := accept()
				s.want(1, operation)
				tt.answer(s)
			}()
			_, err := subscribe(t.Context(), c, 0)
			if status.Code(err) != tt.want {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
}

// TestStreamThatEndsAtOnce has no batch.
func TestStreamThatEndsAtOnce(t *testing.T) {
	t.Parallel()
	c, accept := connect(t)
	go func() {
		s := accept()
		s.want(1, operation)
		s.send(1, operation)
	}()
	stream, err := subscribe(t.Context(), c, 0)
	if !errors.Is(err, io.EOF) {
		t.Errorf("got %v, want %v", err, io.EOF)
	}
	if _, err := receive(stream); !errors.Is(err, io.EOF) {
		t.Errorf("then got %v, want %v", err, io.EOF)
	}
}

// TestServersThatDoNotKnowTheOperation get no answer: the caller ends the call.
func TestServersThatDoNotKnowTheOperation(t *testing.T) {
	t.Parallel()
	c, accept := connect(t)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		s := accept()
		s.want(1, operation)
		cancel()
	}()
	if _, err := subscribe(ctx, c, 0); status.Code(err) != codes.Unavailable {
		t.Errorf("got %v, want %v", err, codes.Unavailable)
	}
}

func TestGreets(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		begin func(net.Conn)
		want  bool
	}{
		"ZeroMQ":  {func(c net.Conn) { _, _ = c.Write(zmtp.AppendGreeting(nil)) }, true},
		"HTTP/2":  {func(c net.Conn) { _ = http2.NewFramer(c, c).WriteSettings() }, false},
		"nothing": {func(net.Conn) {}, false},
		"the end": {func(c net.Conn) { _ = c.Close() }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			here, there := net.Pipe()
			defer func() { _ = here.Close() }()
			go tt.begin(there)
			c, got := lmcachezmq.Greets(here)
			if got != tt.want {
				t.Errorf("got %t, want %t", got, tt.want)
			}
			if b := make([]byte, zmtp.GreetingBytes); got {
				if _, err := io.ReadFull(c, b); err != nil || !slices.Equal(b, zmtp.AppendGreeting(nil)) {
					t.Errorf("read again %x, %v", b, err)
				}
			}
		})
	}
}

// TestPeersThatStopAreNoticed has a server that answers no ZMTP ping. A pause of the test's process delays that.
func TestPeersThatStopAreNoticed(t *testing.T) {
	t.Parallel()
	c, accept := connect(t)
	go func() {
		s := accept()
		s.want(1, operation)
	}()
	began := time.Now()
	if _, err := subscribe(t.Context(), c, 0); status.Code(err) != codes.Unavailable {
		t.Errorf("got %v after %v, want %v", err, time.Since(began), codes.Unavailable)
	}
}
