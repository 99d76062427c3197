package ingest

import (
	"net/netip"

	"github.com/kvcast/kvcast/ingest/sequence"
)

// peer is a connection to a listener. libzmq identifies it by its file descriptor in events
// and messages; the descriptor may be reused later.
type peer struct {
	id sequence.ConnectionID
	fd int
	// address is learned from the first message; invalid before, and where there is none.
	address     netip.Addr
	addressless bool
	// publishers are the publishers whose batches arrive, or arrived last, by this connection.
	publishers map[*publisher]struct{}
}

// peers are a listener's open connections. They are guarded by the listener's mutex.
type peers struct {
	byFD map[int]*peer
	last sequence.ConnectionID // of the last connection
}

// unknown is the descriptor of all connections that libzmq does not identify. They count as
// one that never closes.
const unknown = -1

// noDescriptor stands for no connection.
const noDescriptor = -2

func newPeers() peers {
	ps := peers{byFD: make(map[int]*peer)}
	ps.opened(unknown)
	return ps
}

// descriptor returns the file descriptor; noDescriptor of nil.
func (c *peer) descriptor() int {
	if c == nil {
		return noDescriptor
	}
	return c.fd
}

// opened adds a connection.
func (ps *peers) opened(fd int) {
	ps.last++
	ps.byFD[fd] = &peer{id: ps.last, fd: fd, publishers: make(map[*publisher]struct{})}
}

// closed removes a connection. Its publishers are disconnected unless they have another.
func (ps *peers) closed(in *intake, fd int) {
	c := ps.byFD[fd]
	if c == nil {
		return
	}
	delete(ps.byFD, fd)
	for p := range c.publishers {
		p.worker.mu.Lock()
		p.closedBy(in, c)
		p.worker.mu.Unlock()
	}
}
