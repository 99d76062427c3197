package outbound_test

import (
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
	"go.uber.org/goleak"

	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/internal/zmtp/outbound"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait of the tests.
const patience = time.Minute

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

func config(kind zmtp.SocketType) (outbound.Config, chan outbound.Event) {
	events := make(chan outbound.Event, 100)
	return outbound.Config{Type: kind, HighWater: 1_000_000, OnEvent: func(e outbound.Event) { events <- e }}, events
}

func next(t *testing.T, events chan outbound.Event, kind zmtp.EventKind) outbound.Event {
	t.Helper()
	select {
	case e := <-events:
		if e.Kind != kind {
			t.Fatalf("got event %+v, want kind %d", e, kind)
		}
		return e
	case <-time.After(patience):
		t.Fatalf("no event, want kind %d", kind)
		panic("unreachable")
	}
}

func TestPublishReachesSubscribersOfLibzmq(t *testing.T) {
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
			for until := time.Now().Add(patience); len(events) == 0; runtime.Gosched() {
				// A bound socket of libzmq subscribes when it is used.
				if _, err := sub.GetEvents(); err != nil || time.Now().After(until) {
					t.Fatalf("no subscription: %v", err)
				}
			}
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

func TestRouterAnswersLibzmq(t *testing.T) {
	c, events := config(zmtp.ROUTER)
	router, err := outbound.Bind("tcp", "[::1]:0", c)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { router.Close(0) })
	req := socket(t, zmq4.REQ)
	if err := errors.Join(req.SetIpv6(true), req.Connect("tcp://"+router.Addr().String())); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		if _, err := req.SendMessage(fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
		e := next(t, events, zmtp.Message)
		if len(e.Frames) != 2 || string(e.Frames[1]) != fmt.Sprint(i) {
			t.Fatalf("got request %q", e.Frames)
		}
		router.Send(e.Peer, nil, []byte("reply"))
		router.Send(e.Peer+1, nil, []byte("nobody"))
		if m, err := req.RecvMessageBytes(0); err != nil || string(m[0]) != "reply" {
			t.Fatalf("got reply %q, error %v", m, err)
		}
	}
}

// TestSlowPeerLosesMessages checks that the sender never waits, and a peer that does not read
// loses what exceeds its queue.
func TestSlowPeerLosesMessages(t *testing.T) {
	c, events := config(zmtp.PUB)
	c.HighWater = 10
	pub, err := outbound.Bind("tcp", "127.0.0.1:0", c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pub.Close(0) })
	sub := socket(t, zmq4.SUB)
	if err := errors.Join(sub.SetRcvhwm(1), sub.SetRcvbuf(4096), sub.SetSubscribe(""), sub.Connect("tcp://"+pub.Addr().String())); err != nil {
		t.Fatal(err)
	}
	next(t, events, zmtp.Subscribe)
	const n = 100
	for i := range n {
		pub.Publish(fmt.Append(nil, i), make([]byte, 1<<20))
	}
	pub.Publish([]byte("last"), nil) // dropped as well, or the first after the others
	if m, err := sub.RecvMessageBytes(0); err != nil || string(m[0]) != "0" {
		t.Fatalf("got %d frames, error %v", len(m), err)
	}
}
