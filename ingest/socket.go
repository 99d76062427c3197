package ingest

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/ingest/transport"
)

// What every SUB socket has. There is no high-water mark of what is received: where
// libzmq 4.3.4 stops reading a connection it ends the process when that fails, or when
// heartbeats are on (assertions _io_error, _input_stopped). An inbox bounds what comes
// instead. There are no ZMTP heartbeats either way.
const (
	// noHWM is the setting for no high-water mark.
	noHWM = 0
	// maxFrameBytes is the largest frame of an endpoint that is connected to: libzmq
	// takes memory on the word of its length prefix, and closes the connection of
	// a larger one. What is above maxMessageBytes is refused by itself.
	maxFrameBytes = 64 << 20
	// connectTimeout is how long a host may not answer at all.
	connectTimeout = 5 * time.Second

	// TCP keepalive: a dead peer is noticed after some minute.
	keepaliveIdle     = 30 // s
	keepaliveInterval = 10 // s
	keepaliveCount    = 3
)

// libzmq's answers to binding an address that is none of this machine's: it takes
// what is no IP address, such as a host name, for a network interface.
const (
	errNoDevice = zmq4.Errno(syscall.ENODEV)
	errNotOurs  = zmq4.Errno(syscall.EADDRNOTAVAIL)
)

// sockets makes sockets of one context.
type sockets struct {
	zctx         *zmq4.Context
	reconnectMin time.Duration
	reconnectMax time.Duration
}

// conn is a socket and what tells what happens to its connections.
type conn struct {
	socket  *transport.Socket
	monitor *transport.Monitor
}

// newConn takes over a socket that has not been connected or bound yet.
func newConn(s *zmq4.Socket) (*conn, error) {
	m, err := transport.NewMonitor(s)
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	socket, err := transport.Open(s)
	if err != nil {
		return nil, errors.Join(err, m.Stop(), s.Close(), m.Close())
	}
	return &conn{socket: socket, monitor: m}, nil
}

func (c *conn) close() error { return errors.Join(c.socket.Close(), c.monitor.Close()) }

// connect returns a SUB socket that connects to an endpoint, once.
func (k sockets) connect(endpoint, topic string) (*conn, error) {
	s, err := k.subscribe(topic, maxFrameBytes)
	if err != nil {
		return nil, err
	}
	return connect(s, endpoint)
}

// dealer returns a DEALER socket that connects to a replay socket.
func (k sockets) dealer(endpoint string) (*conn, error) {
	s, err := k.dealing()
	if err != nil {
		return nil, err
	}
	return connect(s, endpoint)
}

func (k sockets) dealing() (*zmq4.Socket, error) {
	s, err := k.zctx.NewSocket(zmq4.DEALER)
	if err != nil {
		return nil, fmt.Errorf("create socket: %w", err)
	}
	err = errors.Join(s.SetRcvhwm(noHWM), s.SetMaxmsgsize(maxFrameBytes), k.common(s))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("set socket options: %w", err), s.Close())
	}
	return s, nil
}

func connect(s *zmq4.Socket, endpoint string) (*conn, error) {
	c, err := newConn(s)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", endpoint, err)
	}
	if err := s.Connect(endpoint); err != nil {
		return nil, errors.Join(fmt.Errorf("connect to %s: %w", endpoint, err), c.close())
	}
	return c, nil
}

// bind returns a SUB socket bound to an endpoint, and its address with what the
// endpoint left open.
func (k sockets) bind(endpoint string) (c *conn, address string, err error) {
	// All topics, so that those that are not accepted can be counted. Who connects
	// here and sends too much will connect again.
	s, err := k.subscribe("", maxMessageBytes)
	if err != nil {
		return nil, "", err
	}
	if c, err = newConn(s); err != nil {
		return nil, "", fmt.Errorf("bind %s: %w", endpoint, err)
	}
	if err := s.Bind(endpoint); err != nil {
		if errors.Is(err, errNoDevice) || errors.Is(err, errNotOurs) {
			err = fmt.Errorf("want * or an IP address of this machine: %w", err)
		}
		return nil, "", errors.Join(fmt.Errorf("bind %s: %w", endpoint, err), c.close())
	}
	if address, err = s.GetLastEndpoint(); err != nil {
		return nil, "", errors.Join(fmt.Errorf("look up address of %s: %w", endpoint, err), c.close())
	}
	return c, address, nil
}

func (k sockets) subscribe(topic string, maxFrame int64) (*zmq4.Socket, error) {
	s, err := k.zctx.NewSocket(zmq4.SUB)
	if err != nil {
		return nil, fmt.Errorf("create socket: %w", err)
	}
	err = errors.Join(s.SetRcvhwm(noHWM), s.SetMaxmsgsize(maxFrame), k.common(s), s.SetSubscribe(topic))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("set socket options: %w", err), s.Close())
	}
	return s, nil
}

// common sets what all sockets have.
func (k sockets) common(s *zmq4.Socket) error {
	return errors.Join(
		s.SetLinger(0),
		s.SetIpv6(true),
		s.SetTcpKeepalive(1),
		s.SetTcpKeepaliveIdle(keepaliveIdle),
		s.SetTcpKeepaliveIntvl(keepaliveInterval),
		s.SetTcpKeepaliveCnt(keepaliveCount),
		s.SetConnectTimeout(connectTimeout),
		// A broken connection is made anew by another socket, long before this.
		s.SetReconnectIvl(time.Hour),
	)
}
