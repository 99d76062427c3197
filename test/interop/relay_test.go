package interop_test

import (
	"net"
	"strings"
	"sync"
	"testing"
)

// maxRecorded bounds what a relay records in each direction, in bytes.
const maxRecorded = 1 << 20

// relay forwards TCP connections between a peer and the transport, and records what each sends.
type relay struct {
	listener net.Listener
	target   string
	side     side
	pass     int           // bytes of the peer that pass before resumed; 0 for all
	resumed  chan struct{} // closed when the rest may pass
	resume   func()
	group    sync.WaitGroup

	mu          sync.Mutex // guards all below
	closed      bool
	connections []net.Conn
	sent, got   []byte // by and for the peer
}

// newRelay returns a relay to an endpoint. It closes when the test ends.
func newRelay(t *testing.T, endpoint string, s side, pass int) *relay {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{listener: l, target: strings.TrimPrefix(endpoint, "tcp://"), side: s, pass: pass, resumed: make(chan struct{})}
	r.resume = sync.OnceFunc(func() { close(r.resumed) })
	r.group.Go(r.accept)
	t.Cleanup(func() {
		_ = l.Close()
		r.resume()
		r.mu.Lock()
		r.closed = true
		for _, c := range r.connections {
			_ = c.Close()
		}
		r.mu.Unlock()
		r.group.Wait()
	})
	return r
}

func (r *relay) endpoint() string { return "tcp://" + r.listener.Addr().String() }

func (r *relay) accept() {
	for {
		in, err := r.listener.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", r.target) //nolint:noctx // loopback answers at once
		if err != nil {
			_ = in.Close()
			continue
		}
		r.mu.Lock()
		r.connections = append(r.connections, in, out)
		if r.closed {
			_, _ = in.Close(), out.Close()
		}
		r.mu.Unlock()
		peer, transport := in, out
		if r.side == weConnect {
			peer, transport = out, in
		}
		r.group.Go(func() { r.copy(transport, peer, &r.sent, r.pass) })
		r.group.Go(func() { r.copy(peer, transport, &r.got, 0) })
	}
}

// copy copies until either end is closed, and then closes the other. If pass is positive, it stops
// reading after so many bytes until resumed.
func (r *relay) copy(to, from net.Conn, record *[]byte, pass int) {
	defer func() { _, _ = to.Close(), from.Close() }()
	buffer := make([]byte, 64<<10)
	for total := 0; ; {
		n, err := from.Read(buffer)
		r.mu.Lock()
		*record = append(*record, buffer[:min(n, maxRecorded-len(*record))]...)
		r.mu.Unlock()
		if _, failed := to.Write(buffer[:n]); failed != nil || err != nil {
			return
		}
		if total += n; pass > 0 && total >= pass {
			<-r.resumed
		}
	}
}

// recorded returns what the peer has sent and got.
func (r *relay) recorded() (sent, got string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return string(r.sent), string(r.got)
}
