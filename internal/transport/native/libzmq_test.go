//go:build cgo

package native_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/native"
)

// socket returns a libzmq socket.
func socket(t *testing.T, kind zmq4.Type) *zmq4.Socket {
	t.Helper()
	s, err := zmq4.NewSocket(kind)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	if err := errors.Join(s.SetLinger(0), s.SetSndhwm(0), s.SetIpv6(true)); err != nil {
		t.Fatal(err)
	}
	return s
}

func bound(t *testing.T, s *zmq4.Socket, endpoint string) string {
	t.Helper()
	if err := s.Bind(endpoint); err != nil {
		t.Skipf("bind %s: %v", endpoint, err)
	}
	last, err := s.GetLastEndpoint()
	if err != nil {
		t.Fatal(err)
	}
	return last
}

// subscribed waits for a subscription at an XPUB socket.
func subscribed(t *testing.T, s *zmq4.Socket, topic string) {
	t.Helper()
	if err := s.SetRcvtimeo(patience); err != nil {
		t.Fatal(err)
	}
	b, err := s.RecvBytes(0)
	if err != nil || string(b) != "\x01"+topic {
		t.Fatalf("got subscription %q, error %v, want to %q", b, err, topic)
	}
}

// sizes of payloads, around the sizes of buffers.
var sizes = []int{0, 1, 255, 256, 4095, 4096, 32 << 10, 64<<10 - 100, 64 << 10, 64<<10 + 1, 100_000, 1 << 20, 3, 5 << 20, 10, 8 << 20}

// rounds is how often messages of all sizes are sent.
var rounds = testclass.Size(1, 3)

// sendSizes sends a message of each size in each round.
func sendSizes(t *testing.T, s *zmq4.Socket) {
	t.Helper()
	for i := range rounds * len(sizes) {
		if _, err := s.SendMessage("kv@", binary.BigEndian.AppendUint64(nil, uint64(i)), pattern(i)); err != nil {
			t.Fatal(err)
		}
	}
}

func pattern(i int) []byte {
	return bytes.Repeat([]byte{byte(i), 1, 2}, sizes[i%len(sizes)]/3+1)[:sizes[i%len(sizes)]]
}

func (r *reader) wantSizes() {
	r.t.Helper()
	for i := range rounds * len(sizes) {
		m := r.message()
		if len(m) != 3 || binary.BigEndian.Uint64(m[1]) != uint64(i) || !bytes.Equal(m[2], pattern(i)) {
			r.t.Fatalf("message %d is wrong: %d frames", i, len(m))
		}
	}
}

func TestSubscribeReceivesEveryMessageOfLibzmq(t *testing.T) {
	t.Parallel()
	for _, endpoint := range []string{"tcp://127.0.0.1:*", "tcp://[::1]:*", "ipc://" + filepath.Join(t.TempDir(), "s")} {
		t.Run(endpoint[:6], func(t *testing.T) {
			pub := socket(t, zmq4.XPUB)
			address := bound(t, pub, endpoint)
			r := read(t)(native.New(native.Config{}).Subscribe(address, "kv@", nil))
			r.want(transport.Connected)
			subscribed(t, pub, "kv@")
			sendSizes(t, pub)
			r.wantSizes()
			if err := pub.Close(); err != nil {
				t.Fatal(err)
			}
			r.want(transport.Disconnected)
			if _, err := r.Next(never); !errors.Is(err, transport.ErrEnded) {
				t.Errorf("after the connection: %v", err)
			}
		})
	}
}

func TestBindReceivesEveryMessageOfLibzmq(t *testing.T) {
	t.Parallel()
	r, address := bind(t, native.Config{})
	for id := 1; id <= 3; id++ {
		pub := socket(t, zmq4.XPUB)
		if err := pub.Connect("tcp://" + address); err != nil {
			t.Fatal(err)
		}
		if e := r.want(transport.Connected); e.Conn != id {
			t.Errorf("connection %d, want %d", e.Conn, id)
		}
		subscribed(t, pub, "")
		sendSizes(t, pub)
		r.wantSizes()
		if err := pub.Close(); err != nil {
			t.Fatal(err)
		}
		if e := r.want(transport.Disconnected); e.Conn != id {
			t.Errorf("connection %d, want %d", e.Conn, id)
		}
	}
}

func TestRequestReceivesReplies(t *testing.T) {
	t.Parallel()
	router := socket(t, zmq4.ROUTER)
	address := bound(t, router, "tcp://127.0.0.1:*")
	r := read(t)(native.New(native.Config{}).Request(address, nil, nil, []byte("request")))
	request, err := router.RecvMessageBytes(0)
	if err != nil || len(request) != 3 || string(request[2]) != "request" {
		t.Fatalf("got request %q, error %v", request, err)
	}
	for i := range 100 {
		if _, err := router.SendMessage(request[0], "", fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	r.want(transport.Connected)
	for i := range 100 {
		if m := r.message(); len(m) != 2 || string(m[1]) != fmt.Sprint(i) {
			t.Fatalf("reply %d is %q", i, m)
		}
	}
}
