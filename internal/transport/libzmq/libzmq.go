//go:build cgo

// Package libzmq implements package transport with libzmq. It is the only package of the module that uses cgo.
//
// A goroutine waits for a Socket on the runtime's poller, as it waits for a file: a thousand sockets need neither a thousand threads nor a
// common poll. Socket.Receive takes many messages with one call to C, without allocating: their frames are views of libzmq's memory. No
// wakeup is lost: Wait returns whenever there is a message.
package libzmq

import (
	"errors"
	"fmt"
	"time"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/transport"
)

const (
	// maxFrameBytes is the largest frame of an endpoint that is connected to: libzmq
	// allocates the length that a frame declares, and closes the connection of a larger one.
	maxFrameBytes = 64 << 20
	// noHWM means no high-water mark. Where libzmq 4.3.4 stops reading a connection, it ends the process if that connection fails, or if
	// heartbeats are on (assertions _io_error, _input_stopped). An inbox bounds what is received instead, and there are no ZMTP heartbeats.
	noHWM = 0
	// noReconnect is the interval at which libzmq reconnects: longer than any socket exists
	// after its connection has broken, because a new socket replaces it.
	noReconnect = time.Hour
)

// Version returns libzmq's version, such as 4.3.4.
func Version() string {
	major, minor, patch := zmq4.Version()
	return fmt.Sprintf("%d.%d.%d", major, minor, patch)
}

// Config is the configuration of a Transport.
type Config struct {
	// MaxSockets is the most sockets of libzmq: three for each Receiver.
	MaxSockets int
	// Budget bounds the bytes that wait to be processed in all Receivers together, except for the first 2 MiB of each; nil means unlimited.
	Budget *budget.Budget
}

// Transport implements transport.Transport.
type Transport struct {
	zmq    *zmq4.Context
	budget *budget.Budget
	pool   pool
}

// New returns a Transport. It must be closed.
func New(c Config) (*Transport, error) {
	z, err := zmq4.NewContext()
	if err != nil {
		return nil, fmt.Errorf("create ZeroMQ context: %w", err)
	}
	if err := z.SetMaxSockets(c.MaxSockets); err != nil {
		return nil, errors.Join(fmt.Errorf("raise ZeroMQ's limit of sockets: %w", err), z.Term())
	}
	return &Transport{zmq: z, budget: c.Budget}, nil
}

// Close implements transport.Transport.
func (t *Transport) Close() error { return t.zmq.Term() }

// Subscribe implements transport.Transport.
func (t *Transport) Subscribe(endpoint, topic string, onDrop func(n int)) (transport.Receiver, error) {
	s, err := t.socket(zmq4.SUB, maxFrameBytes, topic)
	if err != nil {
		return nil, err
	}
	return t.connect(s, endpoint, onDrop)
}

// Request implements transport.Transport.
func (t *Transport) Request(endpoint string, onDrop func(n int), frames ...[]byte) (transport.Receiver, error) {
	s, err := t.socket(zmq4.DEALER, maxFrameBytes, "")
	if err != nil {
		return nil, err
	}
	return t.connect(s, endpoint, onDrop, frames...)
}

// connect returns the Receiver of a socket, which it owns, after sending a message.
func (t *Transport) connect(s *zmq4.Socket, endpoint string, onDrop func(n int), frames ...[]byte) (transport.Receiver, error) {
	r, err := t.newReceiver(s, connectEvents, onDrop)
	if err != nil {
		return nil, err
	}
	err = s.Connect(endpoint)
	if err == nil && len(frames) > 0 {
		err = r.socket.send(frames)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("connect to %s: %w", endpoint, err), r.Close())
	}
	r.start()
	return r, nil
}

// socket returns a socket with its options. topic is for SUB only.
func (t *Transport) socket(kind zmq4.Type, maxFrame int64, topic string) (*zmq4.Socket, error) {
	s, err := t.zmq.NewSocket(kind)
	if err != nil {
		return nil, fmt.Errorf("create socket: %w", err)
	}
	err = errors.Join(
		s.SetRcvhwm(noHWM),
		s.SetMaxmsgsize(maxFrame),
		s.SetLinger(0),
		s.SetIpv6(true),
		s.SetTcpKeepalive(1),
		s.SetTcpKeepaliveIdle(int(transport.KeepaliveIdle/time.Second)),
		s.SetTcpKeepaliveIntvl(int(transport.KeepaliveInterval/time.Second)),
		s.SetTcpKeepaliveCnt(transport.KeepaliveCount),
		s.SetConnectTimeout(transport.ConnectTimeout),
		s.SetHandshakeIvl(transport.ConnectTimeout),
		s.SetReconnectIvl(noReconnect),
	)
	if kind == zmq4.SUB {
		err = errors.Join(err, s.SetSubscribe(topic))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("set socket options: %w", err), s.Close())
	}
	return s, nil
}
