package outbound_test

import (
	"fmt"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/internal/zmtp/outbound"
	"github.com/kvcast/kvcast/test/rawzmtp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait of the tests.
const patience = time.Minute

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

// TestSlowPeerLosesMessages checks that the sender never waits, and a peer that does not read
// loses what exceeds its queue.
func TestSlowPeerLosesMessages(t *testing.T) {
	t.Parallel()
	c, events := config(zmtp.PUB)
	c.HighWater = 10
	pub, err := outbound.Bind("tcp", "127.0.0.1:0", c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pub.Close(0) })
	sub, err := rawzmtp.Dial(t.Context(), zmtp.SUB, pub.Addr().String(), patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sub.Close() })
	next(t, events, zmtp.Subscribe)
	const n = 100
	for i := range n {
		pub.Publish(fmt.Append(nil, i), make([]byte, 1<<20))
	}
	received := 0
	for ; ; received++ {
		m, err := sub.Receive(patience)
		if err != nil {
			t.Fatal(err)
		}
		if string(m[0]) == "last" {
			break
		}
		if received == 0 && string(m[0]) != "0" {
			t.Errorf("the first message is %q", m[0])
		}
		pub.Publish([]byte("last"), nil) // dropped as well, or received after the others
	}
	if received == n {
		t.Errorf("all messages were received, beyond a queue of %d", c.HighWater)
	}
}
