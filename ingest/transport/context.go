package transport

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"
)

const (
	// maxFrameBytes is the largest frame of an endpoint that is connected to: libzmq
	// allocates the length that a frame declares, and closes the connection of a larger one.
	maxFrameBytes = 64 << 20
	// noHWM means no high-water mark. Where libzmq 4.3.4 stops reading a connection, it
	// ends the process if that connection fails, or if heartbeats are on (assertions
	// _io_error, _input_stopped). An Inbox bounds what is received instead, and there are
	// no ZMTP heartbeats.
	noHWM = 0
	// connectTimeout is how long a connection attempt may take.
	connectTimeout = 5 * time.Second
	// noReconnect is the interval at which libzmq reconnects: longer than any socket exists
	// after its connection has broken, because a new socket replaces it.
	noReconnect = time.Hour

	// TCP keepalive: a dead peer is detected within a minute.
	keepaliveIdle     = 30 // s
	keepaliveInterval = 10 // s
	keepaliveCount    = 3
)

// libzmq's errors if this machine does not have the address to bind. libzmq treats a host name
// as the name of a network interface.
const (
	errNoDevice     = zmq4.Errno(syscall.ENODEV)
	errNotAvailable = zmq4.Errno(syscall.EADDRNOTAVAIL)
)

// Context makes sockets. It is safe for concurrent use.
type Context struct{ zmq *zmq4.Context }

// NewContext returns a Context for at most maxSockets sockets of libzmq. It must be closed.
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

// Close releases the context. All sockets must be closed before.
func (c *Context) Close() error { return c.zmq.Term() }

// Conn is a socket and the monitor of its connections.
type Conn struct {
	Socket  *Socket
	Monitor *Monitor
}

// Close closes both. Nothing may use the socket any more.
func (c *Conn) Close() error { return errors.Join(c.Socket.Close(), c.Monitor.Close()) }

// Subscribe connects a SUB socket to an endpoint, once, and subscribes to the topics with
// a prefix. The connection is made in the background.
func (c *Context) Subscribe(endpoint, topic string) (*Conn, error) {
	s, err := c.socket(zmq4.SUB, maxFrameBytes, topic)
	if err != nil {
		return nil, err
	}
	return connect(s, endpoint)
}

// dial connects a DEALER socket to a replay socket.
func (c *Context) dial(endpoint string) (*Conn, error) {
	s, err := c.socket(zmq4.DEALER, maxFrameBytes, "")
	if err != nil {
		return nil, err
	}
	return connect(s, endpoint)
}

func connect(s *zmq4.Socket, endpoint string) (*Conn, error) {
	conn, err := newConn(s)
	if err != nil {
		return nil, err
	}
	if err := s.Connect(endpoint); err != nil {
		return nil, errors.Join(fmt.Errorf("connect to %s: %w", endpoint, err), conn.Close())
	}
	return conn, nil
}

// Bind binds a SUB socket for all topics. It returns the socket's address, with the port
// that the system chose if the endpoint has none. A peer that sends a frame of more than
// MaxPayloadBytes is disconnected.
func (c *Context) Bind(endpoint string) (conn *Conn, address string, err error) {
	s, err := c.socket(zmq4.SUB, MaxPayloadBytes, "")
	if err != nil {
		return nil, "", err
	}
	if conn, err = newConn(s); err != nil {
		return nil, "", err
	}
	if err = s.Bind(endpoint); errors.Is(err, errNoDevice) || errors.Is(err, errNotAvailable) {
		err = fmt.Errorf("want * or an IP address of this machine: %w", err)
	}
	if err == nil {
		address, err = s.GetLastEndpoint()
	}
	if err != nil {
		return nil, "", errors.Join(fmt.Errorf("bind %s: %w", endpoint, err), conn.Close())
	}
	return conn, address, nil
}

// newConn takes ownership of a socket that is neither connected nor bound yet.
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

// socket returns a socket with its options. topic is for SUB only.
func (c *Context) socket(kind zmq4.Type, maxFrame int64, topic string) (*zmq4.Socket, error) {
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
