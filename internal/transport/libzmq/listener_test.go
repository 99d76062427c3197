//go:build cgo

package libzmq_test

import (
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/transport/libzmq"
)

// TestSuspendedListenerAcceptsNothing connects at once after each suspension. A connection that libzmq accepts gets the first bytes of
// its greeting, before it is closed.
func TestSuspendedListenerAcceptsNothing(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ network, bind string }{
		{"tcp", "tcp://127.0.0.1:*"},
		{"unix", "ipc://" + t.TempDir() + "/socket"},
	} {
		t.Run(tt.network, func(t *testing.T) {
			t.Parallel()
			const suspensions = 200
			// libzmq frees closed sockets later: there is room for those of all suspensions.
			tr, err := libzmq.New(libzmq.Config{MaxSockets: 3 * (suspensions + 1)})
			if err != nil {
				t.Fatal(err)
			}
			defer closeNow(t, tr)
			l, endpoint, err := tr.Bind(tt.bind, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer closeNow(t, l)
			_, address, _ := strings.Cut(endpoint, "://")
			for range suspensions {
				l.Suspend()
				c, err := new(net.Dialer).DialContext(t.Context(), tt.network, address)
				switch {
				case errors.Is(err, syscall.ECONNRESET): // closed before the dialer has noticed that it was accepted
				case err != nil:
					t.Fatal(err)
				default:
					_ = c.SetReadDeadline(time.Now().Add(patience))
					if n, err := c.Read(make([]byte, 64)); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
						t.Errorf("read %d bytes, error %v, want a closed connection", n, err)
					}
					closeNow(t, c)
				}
				if err := l.Resume(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}
