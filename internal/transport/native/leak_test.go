package native_test

import (
	"net"
	"os"
	"runtime"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/native"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/test/harness"
)

// usage is what connections must leave as it was.
type usage struct {
	goroutines, descriptors, accepted int
	partial                           int64
}

func usageOf(t *testing.T, tr *native.Transport) (u usage) {
	t.Helper()
	u.goroutines, u.accepted, u.partial = runtime.NumGoroutine(), tr.Accepted(), tr.LargeBytes()
	// Elsewhere than on Linux, descriptors are not counted.
	u.descriptors, _, _ = harness.Descriptors(os.Getpid())
	return u
}

// wantUsage waits until nothing is used that was not used before.
func wantUsage(t *testing.T, tr *native.Transport, before usage) {
	t.Helper()
	harness.WaitFor(t, func() bool {
		u := usageOf(t, tr)
		return u.goroutines <= before.goroutines && u.descriptors <= before.descriptors && u.accepted == 0 && u.partial == 0
	})
}

// TestManyConnectionsLeaveNothing opens and closes connections, some of them in the handshake, and
// some in a message.
func TestManyConnectionsLeaveNothing(t *testing.T) {
	connections := testclass.Size(1000, 10_000)
	tr := native.New(native.Config{Connections: 100})
	r, address := bindTo(t, tr)
	before := usageOf(t, tr)
	greeting := zmtp.AppendGreeting(nil)
	hello := zmtp.AppendMessage(handshake(), []byte("hello"))
	half := append(append([]byte(nil), hello...), 2, 0, 0, 0, 0, 0, 1, 0, 0) // 64 KiB
	half = append(half, make([]byte, 20_000)...)
	for i := range connections {
		p, err := new(net.Dialer).DialContext(t.Context(), "tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		first := [][]byte{greeting, half, hello, hello}[i%4]
		if _, err := p.Write(first); err != nil {
			t.Fatal(err)
		}
		if i%4 == 0 {
			_ = p.(*net.TCPConn).SetLinger(0)
			_ = p.Close()
			continue
		}
		r.want(transport.Connected)
		if m := r.message(); string(m[0]) != "hello" {
			t.Fatalf("got %q", m)
		}
		_ = p.Close()
		r.want(transport.Disconnected)
	}
	wantUsage(t, tr, before)
}

// TestManyReceiversLeaveNothing connects to a publisher again and again. Either side ends the
// connection.
func TestManyReceiversLeaveNothing(t *testing.T) {
	receivers := testclass.Size(1000, 10_000)
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	tr := native.New(native.Config{})
	before := usageOf(t, tr)
	hello := zmtp.AppendMessage(handshake(), []byte("hello"))
	for i := range receivers {
		receiver, err := tr.Subscribe("tcp://"+l.Addr().String(), "", nil)
		if err != nil {
			t.Fatal(err)
		}
		r := &reader{Receiver: receiver, t: t}
		p, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.Write(hello); err != nil {
			t.Fatal(err)
		}
		r.want(transport.Connected)
		if m := r.message(); string(m[0]) != "hello" {
			t.Fatalf("got %q", m)
		}
		if i%2 == 0 {
			_ = p.Close()
			r.want(transport.Disconnected)
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		_ = p.Close()
	}
	wantUsage(t, tr, before)
}
