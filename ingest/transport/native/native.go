// Package native implements the receiving side of ZeroMQ's publish and subscribe, and of its
// requests for replay, over TCP and Unix sockets, without libzmq. The protocol is that of package
// zmtp; this package adds the sockets.
//
// Endpoints flow in; chunks of messages and connection events flow out of a Receiver. Whatever
// peers send, memory is bounded: see Config. A peer that exceeds a limit is disconnected, and
// counted by reason; the other peers keep their connections and their messages.
package native

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/kvcast/kvcast/internal/zmtp"
)

// connectTimeout is how long a connection attempt may take.
const connectTimeout = 5 * time.Second

// keepAlive has the system detect a dead peer within a minute.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 10 * time.Second, Count: 3}

// Config is the configuration of a Transport. Zero fields have defaults.
type Config struct {
	// Limits bound what a peer may send.
	Limits zmtp.Limits
	// Connections bounds the accepted connections of all listeners together, and
	// PerAddress those from one IP address. Defaults: 4096 and 1024.
	Connections, PerAddress int
	// ReadBytes bounds the read buffers of all receivers that connect, and of each that
	// binds, whose messages were not processed. Default: 16 MiB.
	ReadBytes int64
	// PartialBytes bounds the memory of messages that have arrived in part. Default: 32 MiB.
	PartialBytes int64
	// OnReject is called when an accepted peer is disconnected because of what it did;
	// peer is invalid for ipc. nil does nothing. Calls are concurrent.
	OnReject func(peer netip.Addr, err *zmtp.Error)
}

// Transport makes Receivers. It is safe for concurrent use.
type Transport struct {
	config      Config
	reads       *semaphore.Weighted // of receivers that connect
	partials    *partials
	connections connections
}

// New returns a Transport.
func New(c Config) *Transport {
	setDefault(&c.Connections, 4096)
	setDefault(&c.PerAddress, 1024)
	setDefault(&c.ReadBytes, 16<<20)
	setDefault(&c.PartialBytes, 32<<20)
	if c.OnReject == nil {
		c.OnReject = func(netip.Addr, *zmtp.Error) {}
	}
	return &Transport{
		config:      c,
		reads:       newReads(c),
		partials:    newPartials(c.PartialBytes),
		connections: connections{max: c.Connections, perAddress: c.PerAddress, byAddress: make(map[netip.Addr]int)},
	}
}

func setDefault[T int | int64](v *T, def T) {
	if *v == 0 {
		*v = def
	}
}

func newReads(c Config) *semaphore.Weighted {
	return semaphore.NewWeighted(max(1, c.ReadBytes/readBytes))
}

// PartialBytes returns the memory of messages that have arrived in part.
func (t *Transport) PartialBytes() int64 {
	t.partials.mu.Lock()
	defer t.partials.mu.Unlock()
	return t.partials.used
}

// Subscribe connects a SUB socket once, in the background, and subscribes to the topics with a
// prefix. The network is tcp or unix; the address is as net.Dial has it.
func (t *Transport) Subscribe(network, address, topic string) *Receiver {
	r := t.newReceiver(zmtp.Config{Socket: zmtp.SUB, Topic: topic}, t.reads)
	r.done.Go(func() { r.dial(network, address, nil) })
	return r
}

// Request connects a DEALER socket once, in the background, and sends a message.
func (t *Transport) Request(network, address string, frames ...[]byte) *Receiver {
	r := t.newReceiver(zmtp.Config{Socket: zmtp.DEALER}, t.reads)
	request := zmtp.AppendMessage(nil, frames...)
	r.done.Go(func() { r.dial(network, address, request) })
	return r
}

// dial serves one connection.
func (r *Receiver) dial(network, address string, request []byte) {
	dialer := net.Dialer{Timeout: connectTimeout, KeepAliveConfig: keepAlive}
	c, err := dialer.DialContext(r.ctx, network, address)
	if err == nil {
		err = r.serve(1, c, request)
	}
	kind := Disconnected
	if c == nil || errors.As(err, new(*notEstablished)) {
		kind = Failed
	}
	r.push(eventChunk(Event{Kind: kind, Conn: 1, Err: err}))
	r.end(net.ErrClosed)
}

// Bind binds a SUB socket for all topics, and returns its address with the port that was chosen
// for port 0.
func (t *Transport) Bind(network, address string) (*Receiver, net.Addr, error) {
	config := net.ListenConfig{KeepAliveConfig: keepAlive}
	l, err := config.Listen(context.Background(), network, address)
	if err != nil {
		return nil, nil, fmt.Errorf("bind %s: %w", address, err)
	}
	r := t.newReceiver(zmtp.Config{Socket: zmtp.SUB}, newReads(t.config))
	r.done.Go(func() { r.accept(l) })
	return r, l.Addr(), nil
}

// Bounds of the wait after a failure to accept a connection, such as of missing descriptors.
const (
	minAcceptWait = 5 * time.Millisecond
	maxAcceptWait = time.Second
)

// accept serves the connections of a listener.
func (r *Receiver) accept(l net.Listener) {
	stop := context.AfterFunc(r.ctx, func() { _ = l.Close() })
	defer stop()
	wait := minAcceptWait
	for id := 1; ; id++ {
		c, err := l.Accept()
		switch {
		case r.ctx.Err() != nil:
			if c != nil {
				_ = c.Close()
			}
			return
		case err != nil:
			select {
			case <-time.After(wait):
			case <-r.ctx.Done():
			}
			wait = min(2*wait, maxAcceptWait)
			continue
		}
		wait = minAcceptWait
		peer := address(c)
		if err := r.transport.connections.add(peer); err != nil {
			r.transport.config.OnReject(peer, err)
			_ = c.Close()
			continue
		}
		r.done.Go(func() { r.serveAccepted(id, c, peer) })
	}
}

// serveAccepted serves an accepted connection.
func (r *Receiver) serveAccepted(id int, c net.Conn, peer netip.Addr) {
	err := r.serve(id, c, nil)
	if protocol := (*zmtp.Error)(nil); errors.As(err, &protocol) {
		r.transport.config.OnReject(peer, protocol)
	}
	if errors.As(err, new(*notEstablished)) {
		r.transport.connections.remove(peer)
		return
	}
	// The event releases the connection's place when it has been processed, so that the
	// events that wait are bounded as well.
	last := eventChunk(Event{Kind: Disconnected, Conn: id, Err: err})
	last.leaving, last.Peer = true, peer
	r.push(last)
}

// address returns the IP address of a connection's peer; invalid if it has none.
func address(c net.Conn) netip.Addr {
	if a, ok := c.RemoteAddr().(*net.TCPAddr); ok {
		return a.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}

// connections counts the accepted connections.
type connections struct {
	max, perAddress int

	mu        sync.Mutex // guards all below
	all       int
	byAddress map[netip.Addr]int
}

// Reasons of connections that are closed before they are read.
const (
	reasonConnections zmtp.Reason = "connections"
	reasonPerAddress  zmtp.Reason = "connections_per_address"
)

func (c *connections) add(peer netip.Addr) *zmtp.Error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.all >= c.max:
		return &zmtp.Error{Reason: reasonConnections, Detail: fmt.Sprintf("all %d connections are in use", c.max)}
	case peer.IsValid() && c.byAddress[peer] >= c.perAddress:
		return &zmtp.Error{Reason: reasonPerAddress, Detail: fmt.Sprintf("address has %d connections, the most that are allowed", c.perAddress)}
	}
	c.all++
	c.byAddress[peer]++
	return nil
}

func (c *connections) remove(peer netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all--
	if c.byAddress[peer]--; c.byAddress[peer] == 0 {
		delete(c.byAddress, peer)
	}
}
