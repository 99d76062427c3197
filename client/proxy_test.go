package client_test

import (
	"context"
	"io"
	"net"
	"sync"
	"testing"
)

// proxy is the network between a client and whatever server is behind it at the
// time: TCP connections that can be cut, or made to carry nothing any more without
// being closed.
type proxy struct {
	listen net.Listener
	group  sync.WaitGroup

	mu       sync.Mutex // guards all below
	target   string     // empty: connections are closed at once
	open     map[net.Conn]struct{}
	frozen   chan struct{} // closed when what is open carries nothing any more
	accepted int
}

func newProxy(t *testing.T, target string) *proxy {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listen: l, target: target, open: make(map[net.Conn]struct{}), frozen: make(chan struct{})}
	p.group.Go(func() { p.accept(context.WithoutCancel(t.Context())) })
	t.Cleanup(func() {
		_ = l.Close()
		p.cut()
		p.group.Wait()
	})
	return p
}

func (p *proxy) addr() string { return p.listen.Addr().String() }

// to leads new connections to another server.
func (p *proxy) to(target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = target
}

// cut closes all connections.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.open {
		_ = c.Close()
	}
}

// freeze lets the connections that there are carry nothing any more, for ever.
func (p *proxy) freeze() {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.frozen)
	p.frozen = make(chan struct{})
}

// connections is how many there have been.
func (p *proxy) connections() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted
}

func (p *proxy) accept(ctx context.Context) {
	for {
		in, err := p.listen.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		target, frozen := p.target, p.frozen
		p.accepted++
		p.mu.Unlock()
		var out net.Conn
		if target != "" {
			out, err = new(net.Dialer).DialContext(ctx, "tcp", target)
		}
		if target == "" || err != nil {
			_ = in.Close()
			continue
		}
		p.mu.Lock()
		p.open[in], p.open[out] = struct{}{}, struct{}{}
		p.mu.Unlock()
		p.group.Go(func() { p.carry(in, out, frozen) })
		p.group.Go(func() { p.carry(out, in, frozen) })
	}
}

// carry copies until either end is closed.
func (p *proxy) carry(from, to net.Conn, frozen <-chan struct{}) {
	defer func() {
		_ = from.Close()
		_ = to.Close()
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.open, from)
	}()
	b := make([]byte, 32<<10)
	for {
		n, err := from.Read(b)
		select {
		case <-frozen:
			// Who sends is told nothing, who waits gets nothing.
			_, _ = io.Copy(io.Discard, from)
			return
		default:
		}
		if n > 0 {
			if _, err := to.Write(b[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}
