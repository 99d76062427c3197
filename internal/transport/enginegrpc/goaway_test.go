package enginegrpc_test

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/enginegrpc"
)

// TestServerThatSendsCallsAway ends each connection with a GOAWAY, after which gRPC opens another one at once. A call must end, so that the next one
// waits.
func TestServerThatSendsCallsAway(t *testing.T) {
	t.Parallel()
	for name, away := range map[string]func(f *http2.Framer, c net.Conn){
		"at once": func(f *http2.Framer, _ net.Conn) { _ = f.WriteGoAway(0, http2.ErrCodeNo, nil) },
		"after the call": func(f *http2.Framer, _ net.Conn) {
			for {
				frame, err := f.ReadFrame()
				if err != nil {
					return
				}
				if frame.Header().Type == http2.FrameHeaders {
					_ = f.WriteGoAway(0, http2.ErrCodeNo, nil)
					return
				}
			}
		},
		"by a reset": func(_ *http2.Framer, c net.Conn) { _ = c.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			var connections atomic.Int64
			var serving sync.WaitGroup
			defer serving.Wait()
			defer func() { _ = l.Close() }()
			serving.Go(func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					connections.Add(1)
					serving.Go(func() {
						defer func() { _ = c.Close() }()
						if _, err := io.ReadFull(c, make([]byte, len(http2.ClientPreface))); err != nil {
							return
						}
						f := http2.NewFramer(c, c)
						_ = f.WriteSettings()
						away(f, c)
						_, _ = io.Copy(io.Discard, c)
					})
				}
			})
			last := uint64(5)
			r := subscribeBy(t, enginegrpc.New(enginegrpc.Config{}), enginegrpc.Subscription{Endpoint: "smg://" + l.Addr().String(), Last: &last}, 5*time.Second)
			r.want("failed: ")
			r.wantEnd(transport.ErrEnded)
			if n := connections.Load(); n > 2*4 { // a call that resumes, and one that does not, of each method
				t.Errorf("%d connections were opened", n)
			}
		})
	}
}
