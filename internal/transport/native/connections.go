package native

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/kvcast/kvcast/internal/zmtp"
)

// connections are the accepted connections.
type connections struct {
	max, perAddress int

	mu        sync.Mutex // guards all below
	all       int
	byAddress map[netip.Prefix]map[*conn]struct{}
}

// Reasons of connections that are closed before they are read.
const (
	reasonConnections zmtp.Reason = "connections"
	reasonPerAddress  zmtp.Reason = "connections_per_address"
)

func (cs *connections) add(c *conn) *zmtp.Error {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	same := cs.byAddress[c.address]
	switch {
	case cs.all >= cs.max:
		return &zmtp.Error{Reason: reasonConnections, Detail: fmt.Sprintf("all %d connections are in use", cs.max)}
	case c.peer.IsValid() && len(same) >= cs.perAddress:
		return &zmtp.Error{Reason: reasonPerAddress, Detail: fmt.Sprintf("address has %d connections, the most that are allowed", cs.perAddress)}
	case same == nil:
		same = make(map[*conn]struct{})
		cs.byAddress[c.address] = same
	}
	cs.all++
	same[c] = struct{}{}
	return nil
}

func (cs *connections) remove(c *conn) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.all--
	same := cs.byAddress[c.address]
	if delete(same, c); len(same) == 0 {
		delete(cs.byAddress, c.address)
	}
}

// earlier returns the connections from the address of c that its receiver accepted before it, and
// that have received the subscription, without which an engine sends nothing.
func (cs *connections) earlier(c *conn) (all []*conn) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for other := range cs.byAddress[c.address] {
		if other.peer == c.peer && other.established.Load() && other.receiver == c.receiver && other.id < c.id {
			all = append(all, other)
		}
	}
	return all
}

// maxBacklogReads is how many reads empty a socket's receive buffer: 6 MiB at most by default on
// Linux, of which a read takes half a read buffer or more.
const maxBacklogReads = 256

// maxOrderWait bounds how long a connection waits for earlier ones. If kvcast is so far behind, the order is not kept.
const maxOrderWait = 2 * time.Second

// awaitEarlier waits until the ends of earlier connections from the same address are in the queue, as far as the system knows of them. An
// engine that restarts closes its connection before it opens the next, and its batches must be processed in that order.
//
// The caller must not have a read buffer: the other connections may need it.
func (c *conn) awaitEarlier() {
	ctx, cancel := context.WithTimeout(c.ctx, maxOrderWait)
	defer cancel()
	for _, e := range c.receiver.transport.connections.earlier(c) {
		c.awaitEnd(ctx, e)
	}
}

// awaitEnd waits for the last event of an earlier connection, if its peer has closed it.
func (c *conn) awaitEnd(ctx context.Context, e *conn) {
	for range maxBacklogReads {
		read := e.nextRead()
		available, ended := e.peek()
		switch {
		case ended:
			read = nil
		case !available:
			return
		}
		select {
		case <-read:
		case <-e.done:
			return
		case <-ctx.Done():
			return
		}
	}
}

// nextRead returns a channel that is closed after the next read of the connection.
func (c *conn) nextRead() <-chan struct{} {
	next := make(chan struct{})
	for !c.reading.CompareAndSwap(nil, &next) {
		if p := c.reading.Load(); p != nil {
			return *p
		}
	}
	return next
}

// peek reports whether there are bytes to be read, and whether the connection has ended. It does not see an end that follows bytes.
func (c *conn) peek() (available, ended bool) {
	var n int
	var failed error
	var b [1]byte
	err := c.raw.Control(func(fd uintptr) {
		n, _, failed = syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK)
	})
	waits := errors.Is(failed, syscall.EAGAIN) || errors.Is(failed, syscall.EINTR)
	return n > 0, err != nil || n <= 0 && !waits
}
