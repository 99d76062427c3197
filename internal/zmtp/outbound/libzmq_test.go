//go:build cgo

package outbound_test

import (
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/internal/zmtp/outbound"
)

// socket returns a libzmq socket.
func socket(t *testing.T, kind zmq4.Type) *zmq4.Socket {
	t.Helper()
	s, err := zmq4.NewSocket(kind)
	if err == nil {
		t.Cleanup(func() { _ = s.Close() })
		err = errors.Join(s.SetLinger(0), s.SetRcvtimeo(patience), s.SetRcvhwm(0))
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// awaitEvent uses a socket until there is an event: libzmq subscribes when a socket is used.
func awaitEvent(t *testing.T, s *zmq4.Socket, events chan outbound.Event) {
	t.Helper()
	for until := time.Now().Add(patience); len(events) == 0; runtime.Gosched() {
		if _, err := s.GetEvents(); err != nil || time.Now().After(until) {
			t.Fatalf("no event: %v", err)
		}
	}
}

func TestPublishReachesSubscribersOfLibzmq(t *testing.T) {
	t.Parallel()
	for _, binds := range []bool{true, false} {
		t.Run(fmt.Sprintf("binds=%v", binds), func(t *testing.T) {
			c, events := config(zmtp.PUB)
			sub := socket(t, zmq4.SUB)
			if err := sub.SetSubscribe("kv@"); err != nil {
				t.Fatal(err)
			}
			var pub *outbound.Socket
			if binds {
				var err error
				if pub, err = outbound.Bind("tcp", "127.0.0.1:0", c); err != nil {
					t.Fatal(err)
				}
				if err := sub.Connect("tcp://" + pub.Addr().String()); err != nil {
					t.Fatal(err)
				}
			} else {
				if err := sub.Bind("tcp://127.0.0.1:*"); err != nil {
					t.Fatal(err)
				}
				address, err := sub.GetLastEndpoint()
				if err != nil {
					t.Fatal(err)
				}
				pub = outbound.Connect("tcp", address[len("tcp://"):], c)
			}
			awaitEvent(t, sub, events)
			next(t, events, zmtp.Subscribe)
			const n = 10_000
			for i := range n {
				pub.Publish([]byte("other"), nil, nil)
				pub.Publish([]byte("kv@x"), fmt.Append(nil, i), make([]byte, i%1000))
			}
			closed := make(chan struct{})
			go func() {
				pub.Close(patience)
				close(closed)
			}()
			for i := range n {
				m, err := sub.RecvMessageBytes(0)
				if err != nil || len(m) != 3 || string(m[1]) != fmt.Sprint(i) || len(m[2]) != i%1000 {
					t.Fatalf("message %d: %d frames, error %v", i, len(m), err)
				}
			}
			<-closed
			next(t, events, zmtp.Cancel)
		})
	}
}

// TestSubscribersOfLibzmqReconnect closes a publisher, and opens another one at its port.
func TestSubscribersOfLibzmqReconnect(t *testing.T) {
	t.Parallel()
	sub := socket(t, zmq4.SUB)
	if err := errors.Join(sub.SetReconnectIvl(10*time.Millisecond), sub.SetSubscribe("")); err != nil {
		t.Fatal(err)
	}
	address := "127.0.0.1:0"
	for i := range 3 {
		c, events := config(zmtp.PUB)
		pub, err := outbound.Bind("tcp", address, c)
		for until := time.Now().Add(patience); err != nil; pub, err = outbound.Bind("tcp", address, c) {
			if runtime.Gosched(); time.Now().After(until) {
				t.Fatal(err)
			}
		}
		if i == 0 {
			address = pub.Addr().String()
			if err := sub.Connect("tcp://" + address); err != nil {
				t.Fatal(err)
			}
		}
		awaitEvent(t, sub, events)
		next(t, events, zmtp.Subscribe)
		pub.Publish(fmt.Append(nil, i))
		pub.Close(patience)
		if m, err := sub.RecvMessageBytes(0); err != nil || string(m[0]) != fmt.Sprint(i) {
			t.Fatalf("got %q, error %v", m, err)
		}
	}
}

func TestRouterAnswersLibzmq(t *testing.T) {
	t.Parallel()
	for _, kind := range []zmq4.Type{zmq4.REQ, zmq4.DEALER} {
		t.Run(kind.String(), func(t *testing.T) { testRouter(t, kind) })
	}
}

func testRouter(t *testing.T, kind zmq4.Type) {
	t.Helper()
	c, events := config(zmtp.ROUTER)
	router, err := outbound.Bind("tcp", "[::1]:0", c)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { router.Close(0) })
	req := socket(t, kind)
	var delimiter []any // a DEALER adds it itself
	if kind == zmq4.DEALER {
		delimiter = []any{""}
	}
	if err := errors.Join(req.SetIpv6(true), req.Connect("tcp://"+router.Addr().String())); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		if _, err := req.SendMessage(append(delimiter[:len(delimiter):len(delimiter)], fmt.Sprint(i))...); err != nil {
			t.Fatal(err)
		}
		e := next(t, events, zmtp.Message)
		if len(e.Frames) != 2 || string(e.Frames[1]) != fmt.Sprint(i) {
			t.Fatalf("got request %q", e.Frames)
		}
		router.Send(e.Peer, nil, []byte("reply"))
		router.Send(e.Peer+1, nil, []byte("nobody"))
		if m, err := req.RecvMessageBytes(0); err != nil || len(m) != 1+len(delimiter) || string(m[len(m)-1]) != "reply" {
			t.Fatalf("got reply %q, error %v", m, err)
		}
	}
}
