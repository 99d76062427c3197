package conformance

import (
	"net"
	"sync"
)

// cuttable is a listener whose connections can be reset.
type cuttable struct {
	net.Listener

	mu   sync.Mutex
	open map[net.Conn]struct{} // guarded by mu
}

// Accept implements net.Listener.
func (l *cuttable) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open == nil {
		l.open = make(map[net.Conn]struct{})
	}
	l.open[conn] = struct{}{}
	return conn, nil
}

// cut resets all connections, as a peer does that has forgotten them.
func (l *cuttable) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for conn := range l.open {
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // an error means that the connection is closed already
		}
		_ = conn.Close()
	}
	clear(l.open)
}
