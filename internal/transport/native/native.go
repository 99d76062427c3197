// Package native implements package transport in Go, over TCP and Unix sockets. The protocol is that
// of package zmtp; this package adds the sockets.
//
// Whatever peers send, memory is bounded: see Config. A peer that exceeds a limit is disconnected, and reported with its reason; the other
// peers keep their connections and their messages. Nothing is dropped: a peer whose messages are not processed is not read.
package native

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/ledger"
	"github.com/kvcast/kvcast/internal/zmtp"
)

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
	// LargeBytes bounds the memory of messages of more than 32 KiB that are being received or were not processed, and of the first 4 to
	// 32 KiB of others that are being received. A message takes up to twice its size. Default: 24 MiB.
	LargeBytes int64
	// Grace returns how long such a message may bring nothing while others wait for memory. Default: 40 ms.
	Grace func() time.Duration
	// PeerTTL, if not 0, is how long a peer of ZMTP 3.1 that has connected to a listener may get nothing before it closes the
	// connection, if it honours the TTL of PINGs. It ends the connections of a process that stands still.
	PeerTTL time.Duration
	// OnReject is called when an accepted peer is disconnected because of what it did;
	// peer is invalid for ipc. nil does nothing. Calls are concurrent.
	OnReject func(peer netip.Addr, err *zmtp.Error)
}

// DefaultGrace is the default of Config.Grace.
const DefaultGrace = 40 * time.Millisecond

// Transport implements transport.Transport.
type Transport struct {
	config      Config
	reads       *semaphore.Weighted // of receivers that connect
	larges      *ledger.Ledger
	connections connections
}

// New returns a Transport.
func New(c Config) *Transport {
	c.Connections = cmp.Or(c.Connections, 4096)
	c.PerAddress = cmp.Or(c.PerAddress, 1024)
	c.ReadBytes = cmp.Or(c.ReadBytes, 16<<20)
	c.LargeBytes = cmp.Or(c.LargeBytes, 24<<20)
	if c.Grace == nil {
		c.Grace = func() time.Duration { return DefaultGrace }
	}
	if c.OnReject == nil {
		c.OnReject = func(netip.Addr, *zmtp.Error) {}
	}
	return &Transport{
		config:      c,
		reads:       newReads(c),
		larges:      ledger.New(c.LargeBytes, capacity(cmp.Or(c.Limits.Bytes, zmtp.DefaultBytes)), c.Grace),
		connections: connections{max: c.Connections, perAddress: c.PerAddress, byAddress: make(map[netip.Prefix]map[*conn]struct{})},
	}
}

func newReads(c Config) *semaphore.Weighted {
	return semaphore.NewWeighted(max(1, c.ReadBytes/readBytes))
}

// LargeBytes returns the memory that Config.LargeBytes bounds.
func (t *Transport) LargeBytes() int64 { return t.larges.Used() }

// Close implements transport.Transport.
func (t *Transport) Close() error { return nil }

// Subscribe implements transport.Transport. It drops nothing.
func (t *Transport) Subscribe(endpoint, topic string, _ func(int)) (transport.Receiver, error) {
	return t.connect(zmtp.Config{Socket: zmtp.SUB, Topic: topic}, endpoint, nil)
}

// Request implements transport.Transport. It drops nothing.
func (t *Transport) Request(endpoint string, _ func(int), frames ...[]byte) (transport.Receiver, error) {
	return t.connect(zmtp.Config{Socket: zmtp.DEALER}, endpoint, zmtp.AppendMessage(nil, frames...))
}

// RequestFrames implements transport.FrameRequester.
func (t *Transport) RequestFrames(endpoint string, frames ...[]byte) (transport.Receiver, error) {
	return t.connect(zmtp.Config{Socket: zmtp.DEALER, Split: true}, endpoint, zmtp.AppendMessage(nil, frames...))
}

func (t *Transport) connect(c zmtp.Config, endpoint string, request []byte) (transport.Receiver, error) {
	network, address, err := parseEndpoint(endpoint)
	if err != nil {
		return nil, err
	}
	r := t.newReceiver(c, t.reads)
	r.done.Go(func() { r.dial(network, address, request) })
	return r, nil
}

// parseEndpoint returns the network and address of an endpoint for package net.
func parseEndpoint(endpoint string) (network, address string, err error) {
	e, ok := config.ParseEndpoint(endpoint, true)
	if !ok {
		return "", "", fmt.Errorf("parse endpoint %q: want tcp://HOST:PORT or ipc://PATH", endpoint)
	}
	network, address = e.Net()
	return network, address, nil
}

// dial serves one connection.
func (r *Receiver) dial(network, address string, request []byte) {
	dialer := net.Dialer{Timeout: transport.ConnectTimeout, KeepAliveConfig: transport.KeepAlive}
	c, err := dialer.DialContext(r.ctx, network, address)
	if err == nil {
		err = newConn(r.ctx, r, 1, c).serve(request)
	}
	if protocol := (*zmtp.Error)(nil); errors.As(err, &protocol) && protocol.Reason == zmtp.ReasonBytes {
		err = fmt.Errorf("%w: %w", transport.ErrTooLong, err)
	}
	kind := transport.Disconnected
	if c == nil || errors.As(err, new(*notEstablished)) {
		kind = transport.Failed
	}
	r.push(eventChunk(transport.Event{Kind: kind, Conn: 1, Err: err}))
	r.end(transport.ErrEnded)
}

// address returns the IP address of a connection's peer; invalid if it has none.
func address(c net.Conn) netip.Addr {
	if a, ok := c.RemoteAddr().(*net.TCPAddr); ok {
		return a.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}
