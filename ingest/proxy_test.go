package ingest_test

import (
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvcast/kvcast/ingest"
)

// proxy is the network between ingest and an endpoint of an engine: TCP connections
// that can be made to carry nothing any more without being closed.
type proxy struct {
	t      *testing.T
	target string
	listen net.Listener
	group  sync.WaitGroup

	mu      sync.Mutex // guards all below
	changed *sync.Cond // by mu
	closed  bool
	// holed tells that nothing passes. Connections that were there before will never
	// carry anything again, those made meanwhile do so once the hole is closed.
	holed    bool
	open     map[*path]struct{}
	accepted int
	most     int // that were open at a time
}

// path is a connection through a proxy: its two ends.
type path struct {
	ends [2]net.Conn
	dead bool
}

// newProxy returns a proxy in front of a tcp endpoint.
func newProxy(t *testing.T, endpoint string) *proxy {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{t: t, target: strings.TrimPrefix(endpoint, "tcp://"), listen: l, open: make(map[*path]struct{})}
	p.changed = sync.NewCond(&p.mu)
	p.group.Go(p.accept)
	t.Cleanup(p.close)
	return p
}

// Endpoint returns where to connect.
func (p *proxy) Endpoint() string { return "tcp://" + p.listen.Addr().String() }

func (p *proxy) change(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	p.changed.Broadcast()
}

// hole makes a black hole of the network.
func (p *proxy) hole() {
	p.change(func() {
		p.holed = true
		for c := range p.open {
			c.dead = true
		}
	})
}

// heal lets new connections carry data again.
func (p *proxy) heal() { p.change(func() { p.holed = false }) }

// counts returns how many connections were made, and the most at a time.
func (p *proxy) counts() (accepted, most int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted, p.most
}

// paths returns how many connections there are, and how many of them are dead.
func (p *proxy) paths() (alive, dead int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.open {
		if c.dead {
			dead++
		} else {
			alive++
		}
	}
	return alive, dead
}

func (p *proxy) close() {
	p.change(func() {
		p.closed = true
		for c := range p.open {
			c.close()
		}
	})
	_ = p.listen.Close()
	p.group.Wait()
}

func (c *path) close() {
	for _, e := range c.ends {
		_ = e.Close()
	}
}

func (p *proxy) accept() {
	for {
		in, err := p.listen.Accept()
		if err != nil {
			return
		}
		out, err := new(net.Dialer).DialContext(p.t.Context(), "tcp", p.target)
		if err != nil {
			_ = in.Close()
			continue
		}
		c := &path{ends: [2]net.Conn{in, out}}
		p.change(func() {
			p.accepted++
			p.open[c] = struct{}{}
			p.most = max(p.most, len(p.open))
			if p.closed {
				c.close()
			}
		})
		var pumps sync.WaitGroup
		pumps.Go(func() { p.pump(c, out, in) })
		pumps.Go(func() { p.pump(c, in, out) })
		p.group.Go(func() {
			pumps.Wait()
			p.change(func() { delete(p.open, c) })
		})
	}
}

// pump carries what comes from one end to the other, and what comes by a dead
// connection nowhere.
func (p *proxy) pump(c *path, to, from net.Conn) {
	defer c.close()
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		if err != nil {
			return
		}
		if !p.passes(c) {
			continue
		}
		if _, err := to.Write(b[:n]); err != nil {
			return
		}
	}
}

// passes waits until what was read may be passed on, and tells whether it may at
// all.
func (p *proxy) passes(c *path) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.holed && !c.dead && !p.closed {
		p.changed.Wait()
	}
	return !c.dead
}

// awaitState waits until a source is in a state.
func awaitState(t *testing.T, in *ingest.Ingest, source int, want ingest.SourceState) {
	t.Helper()
	look := time.NewTicker(time.Millisecond)
	defer look.Stop()
	for ctx := patient(t); ; {
		all := in.Sources()
		if source < len(all) && all[source].State == want {
			return
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			t.Fatalf("state %v of source %d does not come: %+v", want, source, all)
		}
	}
}
