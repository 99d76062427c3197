package transport

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"

	"github.com/kvcast/kvcast/ingest/config"
)

// KeepAlive makes the system detect dead peers of TCP connections.
var KeepAlive = net.KeepAliveConfig{Enable: true, Idle: KeepaliveIdle, Interval: KeepaliveInterval, Count: KeepaliveCount}

// Listen returns the socket that a Listener accepts connections from, and its endpoint.
func Listen(endpoint string) (l net.Listener, bound string, err error) {
	e, ok := config.ParseEndpoint(endpoint, true)
	if !ok {
		return nil, "", fmt.Errorf("parse endpoint %q: want %s", endpoint, config.AllowedBind)
	}
	network, address := e.Net()
	if host, _, _ := net.SplitHostPort(address); network == "tcp" && host != "" && net.ParseIP(host) == nil {
		return nil, "", fmt.Errorf("bind %s: want * or an IP address of this machine", endpoint)
	}
	if network == "unix" {
		if err := config.RemoveSocket(address); err != nil {
			return nil, "", fmt.Errorf("bind %s: %w", endpoint, err)
		}
	}
	listen := net.ListenConfig{KeepAliveConfig: KeepAlive}
	l, err = listen.Listen(context.Background(), network, address)
	if errno := syscall.Errno(0); errors.As(err, &errno) {
		err = errno // without the address, which the error below has
	}
	if errors.Is(err, syscall.EADDRNOTAVAIL) {
		err = fmt.Errorf("want * or an IP address of this machine: %w", err)
	}
	if err != nil {
		return nil, "", fmt.Errorf("bind %s: %w", endpoint, err)
	}
	if network == "unix" {
		return l, endpoint, nil
	}
	return l, "tcp://" + l.Addr().String(), nil
}

// Refuse closes a connection of a Listener so that the peer notices at once, and this system forgets it at once.
func Refuse(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = c.Close()
}
