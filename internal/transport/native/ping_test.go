package native_test

import (
	"bytes"
	"io"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/native"
	"github.com/kvcast/kvcast/internal/zmtp"
)

// TestPeersGetPingsWithTTL has a peer that sends all the time, whose messages are not processed. It must get PINGs all the same: if
// they ended, it would close the connection of a server that is only slow.
func TestPeersGetPingsWithTTL(t *testing.T) {
	t.Parallel()
	const ttl = 300 * time.Millisecond
	r, address := bind(t, native.Config{PeerTTL: ttl})
	old := dial(t, address)
	greeting := handshake()
	greeting[11] = 0 // ZMTP 3.0, which has no PING
	old.write(greeting)
	r.want(transport.Connected)

	p := dial(t, address)
	p.write(handshake())
	_ = p.SetDeadline(time.Now().Add(patience))
	flooded := make(chan struct{})
	go func() {
		defer close(flooded)
		message := zmtp.AppendMessage(nil, []byte("topic"), make([]byte, 8), make([]byte, 16<<10))
		for {
			if _, err := p.Write(message); err != nil {
				return
			}
		}
	}()
	ping, got := zmtp.AppendPing(nil, ttl), []byte(nil)
	for b := make([]byte, 4096); bytes.Count(got, ping) < 5; {
		n, err := p.Read(b)
		if err != nil {
			t.Fatalf("after %q: %v", got, err)
		}
		got = append(got, b[:n]...)
	}
	if at := bytes.Index(got, []byte("SUBSCRIBE")); at < 0 || at > bytes.Index(got, ping) {
		t.Errorf("got %q, want PINGs after the subscription", got)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	<-flooded
	r.Interrupt()
	_ = old.SetReadDeadline(time.Now().Add(patience))
	if got, err := io.ReadAll(old); err != nil || bytes.Contains(got, []byte("PING")) {
		t.Errorf("a peer of ZMTP 3.0 got %q, error %v", got, err)
	}
}
