package transport

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"
)

const (
	// MaxPayloadBytes is the length of the longest payload. It is more than ten times the
	// largest batch of an engine: a step that stores 128 K tokens takes some 700 KB.
	MaxPayloadBytes = 8 << 20
	// maxFrameBytes is the largest frame of an endpoint that is connected to: libzmq
	// allocates what its length prefix says, and closes the connection of a larger one.
	maxFrameBytes = 64 << 20
	// noHWM means no high-water mark. Where libzmq 4.3.4 stops reading a connection it ends
	// the process when that fails, or when heartbeats are on (assertions _io_error,
	// _input_stopped). An Inbox bounds what is received instead, and there are no ZMTP
	// heartbeats.
	noHWM = 0
	// connectTimeout is how long a connection attempt may take.
	connectTimeout = 5 * time.Second

	// TCP keepalive: a dead peer is detected within a minute.
	keepaliveIdle     = 30 // s
	keepaliveInterval = 10 // s
	keepaliveCount    = 3
)

// libzmq's errors of binding an address that is none of this machine's: it takes what is
// no IP address, such as a host name, for a network interface.
const (
	errNoDevice     = zmq4.Errno(syscall.ENODEV)
	errNotAvailable = zmq4.Errno(syscall.EADDRNOTAVAIL)
)

// Context makes sockets. It is safe for concurrent use.
type Context struct{ zmq *zmq4.Context }

// NewContext returns a Context for at most so many sockets of libzmq. It must be closed.
func NewContext(maxSockets int) (*Context, error) {
	z, err := zmq4.NewContext()
	if err != nil {
		return nil, fmt.Errorf("create ZeroMQ context: %w", err)
	}
	if err := z.SetMaxSockets(maxSockets); err != nil {
		return nil, errors.Join(fmt.Errorf("raise ZeroMQ's limit of sockets: %w", err), z.Term())
	}
	return &Context{z}, nil
}

// Close waits until what closed sockets have left is released. All sockets must be closed.
func (c *Context) Close() error { return c.zmq.Term() }

// Conn is a socket and the monitor of its connections.
type Conn struct {
	Socket  *Socket
	Monitor *Monitor
}

// newConn takes over a socket that has not been connected or bound yet.
func newConn(s *zmq4.Socket) (*Conn, error) {
	m, err := NewMonitor(s)
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	socket, err := Open(s)
	if err != nil {
		return nil, errors.Join(err, m.Stop(), s.Close(), m.Close())
	}
	return &Conn{Socket: socket, Monitor: m}, nil
}

// Close closes both. Nothing may use the socket any more.
func (c *Conn) Close() error { return errors.Join(c.Socket.Close(), c.Monitor.Close()) }

// Subscribe connects a SUB socket to an endpoint, once, and subscribes to the topics with
// a prefix. The connection is made in the background.
func (c *Context) Subscribe(endpoint, topic string) (*Conn, error) {
	s, err := c.sub(topic, maxFrameBytes)
	if err != nil {
		return nil, err
	}
	return connect(s, endpoint)
}

// Bind binds a SUB socket for all topics, and returns its address with the port that was
// chosen for one left open. A peer that sends a frame of more than MaxPayloadBytes is
// disconnected.
func (c *Context) Bind(endpoint string) (conn *Conn, address string, err error) {
	s, err := c.sub("", MaxPayloadBytes)
	if err != nil {
		return nil, "", err
	}
	if conn, err = newConn(s); err != nil {
		return nil, "", fmt.Errorf("bind %s: %w", endpoint, err)
	}
	if err := s.Bind(endpoint); err != nil {
		if errors.Is(err, errNoDevice) || errors.Is(err, errNotAvailable) {
			err = fmt.Errorf("want * or an IP address of this machine: %w", err)
		}
		return nil, "", errors.Join(fmt.Errorf("bind %s: %w", endpoint, err), conn.Close())
	}
	if address, err = s.GetLastEndpoint(); err != nil {
		return nil, "", errors.Join(fmt.Errorf("look up address of %s: %w", endpoint, err), conn.Close())
	}
	return conn, address, nil
}

// dial connects a DEALER socket to a replay socket.
func (c *Context) dial(endpoint string) (*Conn, error) {
	s, err := c.dealer()
	if err != nil {
		return nil, err
	}
	return connect(s, endpoint)
}

func connect(s *zmq4.Socket, endpoint string) (*Conn, error) {
	conn, err := newConn(s)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", endpoint, err)
	}
	if err := s.Connect(endpoint); err != nil {
		return nil, errors.Join(fmt.Errorf("connect to %s: %w", endpoint, err), conn.Close())
	}
	return conn, nil
}

func (c *Context) sub(topic string, maxFrame int64) (*zmq4.Socket, error) {
	return c.socket(zmq4.SUB, maxFrame, func(s *zmq4.Socket) error { return s.SetSubscribe(topic) })
}

func (c *Context) dealer() (*zmq4.Socket, error) {
	return c.socket(zmq4.DEALER, maxFrameBytes, func(*zmq4.Socket) error { return nil })
}

func (c *Context) socket(kind zmq4.Type, maxFrame int64, prepare func(*zmq4.Socket) error) (*zmq4.Socket, error) {
	s, err := c.zmq.NewSocket(kind)
	if err != nil {
		return nil, fmt.Errorf("create socket: %w", err)
	}
	err = errors.Join(
		s.SetRcvhwm(noHWM),
		s.SetMaxmsgsize(maxFrame),
		s.SetLinger(0),
		s.SetIpv6(true),
		s.SetTcpKeepalive(1),
		s.SetTcpKeepaliveIdle(keepaliveIdle),
		s.SetTcpKeepaliveIntvl(keepaliveInterval),
		s.SetTcpKeepaliveCnt(keepaliveCount),
		s.SetConnectTimeout(connectTimeout),
		s.SetReconnectIvl(time.Hour), // another socket replaces a broken connection long before
		prepare(s),
	)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("set socket options: %w", err), s.Close())
	}
	return s, nil
}
