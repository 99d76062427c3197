package native_test

import (
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/native"
	"github.com/kvcast/kvcast/internal/zmtp"
)

// TestWakeMovesTheDeadline wakes receivers without messages again and again, each time in the middle
// of a wait or just before it.
func TestWakeMovesTheDeadline(t *testing.T) {
	t.Parallel()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	bound, _ := bind(t, native.Config{})
	// The peer answers no PING.
	connected := read(t)(native.New(native.Config{Limits: zmtp.Limits{Heartbeat: -1}}).Subscribe("tcp://"+l.Addr().String(), "", nil))
	peer, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = peer.Close() })
	if _, err := peer.Write(handshake()); err != nil {
		t.Fatal(err)
	}
	connected.want(transport.Connected)
	for name, r := range map[string]*reader{"binds": bound, "connects": connected} {
		t.Run(name, func(t *testing.T) {
			for range 1000 {
				waits := make(chan struct{}, 1)
				go func() {
					<-waits
					r.Wake()
				}()
				calls := 0
				deadline := func() time.Time {
					if calls++; calls == 1 {
						waits <- struct{}{}
						return time.Time{}
					}
					return time.Now()
				}
				_, err := r.Next(deadline)
				if !errors.Is(err, os.ErrDeadlineExceeded) || calls < 2 {
					t.Fatalf("error %v after %d calls of deadline", err, calls)
				}
			}
		})
	}
}
