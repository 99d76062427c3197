package ingest

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"
)

// What every SUB socket has. There are no ZMTP heartbeats: with them libzmq
// 4.3.4 aborts the process (assertion _input_stopped) when the reader of a
// socket with a finite high-water mark stalls.
const (
	// receiveHWM is how many messages libzmq keeps of a publisher before it leaves
	// the rest in the connection.
	receiveHWM = 10_000
	// maxFrameBytes is the largest frame of an endpoint that is connected to: libzmq
	// takes memory on the word of its length prefix, and closes the connection of
	// a larger one. It does not connect again by itself then, as it does after any
	// other end, so that this is far above maxMessageBytes, which is what is taken.
	maxFrameBytes = 64 << 20

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

// connect returns a SUB socket that connects to an endpoint, now and whenever
// the connection breaks.
func (k sockets) connect(endpoint, topic string) (*zmq4.Socket, error) {
	s, err := k.subscribe(topic, maxFrameBytes)
	if err != nil {
		return nil, err
	}
	if err := s.Connect(endpoint); err != nil {
		return nil, errors.Join(fmt.Errorf("connect to %s: %w", endpoint, err), s.Close())
	}
	return s, nil
}

// bind returns a SUB socket bound to an endpoint, and its address with what the
// endpoint left open.
func (k sockets) bind(endpoint string) (s *zmq4.Socket, address string, err error) {
	// All topics, so that those that are not accepted can be counted. Who connects
	// here and sends too much will connect again.
	if s, err = k.subscribe("", maxMessageBytes); err != nil {
		return nil, "", err
	}
	if err := s.Bind(endpoint); err != nil {
		if errors.Is(err, errNoDevice) || errors.Is(err, errNotOurs) {
			err = fmt.Errorf("want * or an IP address of this machine: %w", err)
		}
		return nil, "", errors.Join(fmt.Errorf("bind %s: %w", endpoint, err), s.Close())
	}
	if address, err = s.GetLastEndpoint(); err != nil {
		return nil, "", errors.Join(fmt.Errorf("look up address of %s: %w", endpoint, err), s.Close())
	}
	return s, address, nil
}

func (k sockets) subscribe(topic string, maxFrame int64) (*zmq4.Socket, error) {
	s, err := k.zctx.NewSocket(zmq4.SUB)
	if err != nil {
		return nil, fmt.Errorf("create socket: %w", err)
	}
	err = errors.Join(
		s.SetRcvhwm(receiveHWM),
		s.SetMaxmsgsize(maxFrame),
		s.SetLinger(0),
		s.SetIpv6(true),
		s.SetTcpKeepalive(1),
		s.SetTcpKeepaliveIdle(keepaliveIdle),
		s.SetTcpKeepaliveIntvl(keepaliveInterval),
		s.SetTcpKeepaliveCnt(keepaliveCount),
		s.SetReconnectIvl(k.reconnectMin),
		s.SetReconnectIvlMax(k.reconnectMax),
		s.SetSubscribe(topic),
	)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("set socket options: %w", err), s.Close())
	}
	return s, nil
}

// newPair returns the two ends of a pipe within a context.
func newPair(zctx *zmq4.Context, endpoint string) (a, b *zmq4.Socket, err error) {
	if a, err = zctx.NewSocket(zmq4.PAIR); err != nil {
		return nil, nil, fmt.Errorf("create socket: %w", err)
	}
	if b, err = zctx.NewSocket(zmq4.PAIR); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("create socket: %w", err), a.Close())
	}
	err = errors.Join(a.SetLinger(0), b.SetLinger(0))
	if err == nil {
		err = a.Bind(endpoint)
	}
	if err == nil {
		err = b.Connect(endpoint)
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("make pipe %s: %w", endpoint, err), a.Close(), b.Close())
	}
	return a, b, nil
}
