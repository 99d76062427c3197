package harness

import (
	"context"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"time"
)

// Proxy is a TCP proxy that simulates network faults. Its methods are safe for concurrent use.
type Proxy struct {
	listener net.Listener
	group    sync.WaitGroup

	mu          sync.Mutex // guards all below
	changed     *sync.Cond // of mu
	targets     []string   // those of new connections, the next one first
	closed      bool
	partitioned bool
	left        int // bytes until a partition; 0: none is planned
	rate        int // bytes a second of each direction of a connection; 0: no limit
	links       map[*link]struct{}
	accepted    int
}

// link is a connection through a proxy.
type link struct {
	ends   []net.Conn
	frozen bool
}

// ProxyStats counts connections.
type ProxyStats struct {
	// Accepted is the number of connections so far, including rejected connections.
	Accepted int
	// Alive is the number of open connections that are not frozen, and Frozen of open connections that are.
	Alive, Frozen int
}

// NewProxy returns a proxy that forwards connections to a TCP address. With an empty target it rejects
// connections. It closes when the test ends.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{listener: l, targets: []string{target}, links: make(map[*link]struct{})}
	p.changed = sync.NewCond(&p.mu)
	p.group.Go(p.accept)
	t.Cleanup(func() {
		_ = l.Close()
		p.update(func() { p.closed = true })
		p.Cut()
		p.group.Wait()
	})
	return p
}

// Addr returns the address that clients connect to.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Retarget forwards new connections to other addresses: to each in turn, as a load balancer does. An empty address rejects them.
func (p *Proxy) Retarget(targets ...string) { p.update(func() { p.targets = slices.Clone(targets) }) }

// Cut closes all connections.
func (p *Proxy) Cut() {
	p.update(func() {
		for l := range p.links {
			l.close()
		}
	})
}

// Freeze discards all further data of the open connections without closing them. New connections work.
func (p *Proxy) Freeze() { p.update(p.freeze) }

func (p *Proxy) freeze() {
	for l := range p.links {
		l.frozen = true
	}
}

// Partition does what Freeze does, and blocks the data of new connections until Heal.
func (p *Proxy) Partition() { p.update(p.partition) }

func (p *Proxy) partition() {
	p.freeze()
	p.partitioned = true
}

// PartitionAfter does what Partition does once a number of bytes, in both directions together, has arrived from now on. The data that reaches
// the number is not forwarded.
func (p *Proxy) PartitionAfter(bytes int) { p.update(func() { p.left = bytes }) }

// Throttle limits each direction of each connection to a number of bytes a second, on average; 0 ends that.
func (p *Proxy) Throttle(bytes int) { p.update(func() { p.rate = bytes }) }

// Hold keeps the data of all connections until Heal, and forwards it then.
func (p *Proxy) Hold() { p.update(func() { p.partitioned = true }) }

// Heal ends a Partition and a Hold. Frozen connections stay frozen.
func (p *Proxy) Heal() { p.update(func() { p.partitioned = false }) }

// Stats returns the current counts.
func (p *Proxy) Stats() ProxyStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := ProxyStats{Accepted: p.accepted}
	for l := range p.links {
		if l.frozen {
			s.Frozen++
		} else {
			s.Alive++
		}
	}
	return s
}

func (p *Proxy) update(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	p.changed.Broadcast()
}

func (p *Proxy) accept() {
	for {
		in, err := p.listener.Accept()
		if err != nil {
			return
		}
		l := &link{ends: []net.Conn{in}}
		var target string
		p.update(func() {
			p.accepted++
			p.links[l] = struct{}{}
			target = p.targets[0]
			p.targets = append(p.targets[1:], target)
		})
		p.group.Go(func() {
			p.connect(l, target)
			p.update(func() { delete(p.links, l) })
		})
	}
}

// connect copies data between a link and its target until one of them closes.
func (p *Proxy) connect(l *link, target string) {
	in := l.ends[0]
	defer func() { _ = in.Close() }()
	if target == "" {
		return
	}
	out, err := new(net.Dialer).DialContext(context.Background(), "tcp", target)
	if err != nil {
		return
	}
	p.update(func() {
		l.ends = append(l.ends, out)
		if p.closed {
			l.close()
		}
	})
	var copies sync.WaitGroup
	copies.Go(func() { p.copy(l, out, in) })
	copies.Go(func() { p.copy(l, in, out) })
	copies.Wait()
}

func (l *link) close() {
	for _, c := range l.ends {
		_ = c.Close()
	}
}

// copy copies from one end to the other. It reads and discards the data of a frozen link, so that the sender does not
// block.
func (p *Proxy) copy(l *link, to, from net.Conn) {
	defer func() {
		_ = to.Close()
		_ = from.Close()
	}()
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		if n > 0 {
			if !p.passes(l, n) {
				_, _ = io.Copy(io.Discard, from)
				return
			}
			p.delay(n)
			if _, err := to.Write(b[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// passes reports whether a link, which has received a number of bytes, is neither frozen nor closed. It waits for the end of a partition.
func (p *Proxy) passes(l *link, bytes int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left > 0 {
		if p.left = max(0, p.left-bytes); p.left == 0 {
			p.partition()
			p.changed.Broadcast()
		}
	}
	for p.partitioned && !l.frozen && !p.closed {
		p.changed.Wait()
	}
	return !l.frozen && !p.closed
}

// delay waits for as long as a number of bytes takes at the rate of the proxy.
func (p *Proxy) delay(bytes int) {
	p.mu.Lock()
	rate := p.rate
	p.mu.Unlock()
	if rate > 0 {
		time.Sleep(time.Duration(bytes) * time.Second / time.Duration(rate))
	}
}
