package budget_test

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvcast/kvcast/internal/budget"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// dialFrom connects from an address of this machine.
func dialFrom(t *testing.T, from string, to net.Addr) net.Conn {
	t.Helper()
	c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).DialContext(t.Context(), "tcp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestConnectionsBeyondTheLimitsAreClosed(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // it does not block
	if err != nil {
		t.Fatal(err)
	}
	l := budget.NewShares(budget.New("connections", 4), 3).Limit(inner)
	accepted := make(chan net.Conn)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	defer func() {
		_ = l.Close()
		<-ended
	}()
	admitted := func(from string) net.Conn {
		t.Helper()
		dialFrom(t, from, l.Addr())
		select {
		case c := <-accepted:
			t.Cleanup(func() { _ = c.Close() })
			return c
		case <-time.After(time.Minute):
			t.Fatalf("a connection from %s was not accepted", from)
			return nil
		}
	}
	refused := func(from string) {
		t.Helper()
		c := dialFrom(t, from, l.Addr())
		if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		if n, err := c.Read(make([]byte, 1)); err != io.EOF || n != 0 { //nolint:errorlint // Read returns it unwrapped
			t.Errorf("a connection from %s: read %d bytes, error %v, want EOF", from, n, err)
		}
	}
	displaced := func(c net.Conn) {
		t.Helper()
		if err := c.SetReadDeadline(time.Now()); !errors.Is(err, net.ErrClosed) {
			t.Errorf("got %v, want that the connection is closed", err)
		}
	}
	oldest, next := admitted("127.0.0.1"), admitted("127.0.0.1")
	admitted("127.0.0.1")
	refused("127.0.0.1") // beyond its share
	admitted("127.0.0.2")
	admitted("127.0.0.2") // in place of the oldest of the address with the most
	displaced(oldest)
	refused("127.0.0.1") // both have as many
	admitted("127.0.0.3")
	displaced(next)
	last := admitted("127.0.0.4")
	refused("127.0.0.5") // each address has one
	for range 2 {        // the second call must not release another connection
		_ = last.Close()
	}
	admitted("127.0.0.5")
	refused("127.0.0.6")
}
