//go:build cgo

package libzmq_test

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
	"go.uber.org/goleak"

	"github.com/kvcast/kvcast/internal/transport/libzmq"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds each wait of a test. Waits usually take milliseconds; patience allows for slow
// machines.
const patience = 2 * time.Minute

// newContext returns a context that ends with the test.
func newContext(t testing.TB) *zmq4.Context {
	t.Helper()
	zctx, err := zmq4.NewContext()
	if err == nil {
		err = zctx.SetMaxSockets(4096)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := zctx.Term(); err != nil {
			t.Error(err)
		}
	})
	return zctx
}

// newSocket returns a socket without limits that is closed with the test.
func newSocket(t testing.TB, zctx *zmq4.Context, kind zmq4.Type) *zmq4.Socket {
	t.Helper()
	s, err := zctx.NewSocket(kind)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := errors.Join(s.SetLinger(0), s.SetSndhwm(0), s.SetRcvhwm(0)); err != nil {
		t.Fatal(err)
	}
	if kind == zmq4.SUB {
		if err := s.SetSubscribe(""); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// mustOpen returns a socket that is closed with the test. Its Wait is interrupted after
// patience.
func mustOpen(t testing.TB, zs *zmq4.Socket) *libzmq.Socket {
	t.Helper()
	s, err := libzmq.Open(zs)
	if err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(patience, s.Interrupt)
	t.Cleanup(func() {
		timer.Stop()
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// receive releases the batch and receives messages. It returns their number.
func receive(s *libzmq.Socket, b *libzmq.Batch) (int, error) {
	b.Release()
	err := s.Receive(b)
	return b.Len(), err
}

// bindOf binds a socket to an endpoint and returns its address.
func bindOf(t testing.TB, s *zmq4.Socket, endpoint string) string {
	t.Helper()
	if err := s.Bind(endpoint); err != nil {
		t.Fatal(err)
	}
	address, err := s.GetLastEndpoint()
	if err != nil {
		t.Fatal(err)
	}
	return address
}

// connectTo connects a socket to an endpoint.
func connectTo(t testing.TB, s *zmq4.Socket, endpoint string) {
	t.Helper()
	if err := s.Connect(endpoint); err != nil {
		t.Fatal(err)
	}
}

// sendTo sends a message.
func sendTo(t testing.TB, s *zmq4.Socket, frames ...[]byte) {
	t.Helper()
	for i, f := range frames {
		flags := zmq4.SNDMORE
		if i == len(frames)-1 {
			flags = 0
		}
		if _, err := s.SendBytes(f, flags); err != nil {
			t.Fatal(err)
		}
	}
}

// transports differ in what signals the receiver's descriptor: libzmq's I/O thread, or the sender.
var transports = []struct{ name, endpoint string }{
	{"tcp", "tcp://127.0.0.1:*"},
	{"ipc", "ipc://*"},
	{"inproc", "inproc://transport-test"},
}

// pair returns both ends of a connection; the first receives.
func pair(t testing.TB, zctx *zmq4.Context, endpoint string) (receiver, sender *zmq4.Socket) {
	t.Helper()
	receiver, sender = newSocket(t, zctx, zmq4.PAIR), newSocket(t, zctx, zmq4.PAIR)
	connectTo(t, sender, bindOf(t, receiver, endpoint))
	return receiver, sender
}

// closeNow closes c before the test ends.
func closeNow(t testing.TB, c interface{ Close() error }) {
	t.Helper()
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
}

// openFiles returns the number of open files of the process. It skips the test where the
// number is not available.
func openFiles(t *testing.T) int {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("there is nothing to count files with:", err)
	}
	return len(files)
}
