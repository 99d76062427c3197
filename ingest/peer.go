package ingest

import (
	"net/netip"
	"time"

	"github.com/kvcast/kvcast/ingest/sequence"
)

// peer is a connection to a listener. libzmq identifies it by its file descriptor in events and
// messages; after the connection is closed another may have the same descriptor.
type peer struct {
	id sequence.ConnectionID
	fd int
	// address is set by the first message. It is invalid before, and if the peer has none.
	address     netip.Addr
	addressless bool
	// publishers are the publishers that have this connection: see Machine.Connections.
	publishers map[*publisher]struct{}
}

// peers are a listener's open connections. They are guarded by the listener's mutex.
type peers struct {
	byFD map[int]*peer
	byID map[sequence.ConnectionID]*peer
	last sequence.ConnectionID // the id of the newest connection
}

const (
	// unidentified is the descriptor of all connections that libzmq does not identify. They
	// count as one connection, which is never closed.
	unidentified = -1
	// noDescriptor is the descriptor of no connection.
	noDescriptor = -2
)

func newPeers() peers {
	ps := peers{byFD: make(map[int]*peer), byID: make(map[sequence.ConnectionID]*peer)}
	ps.open(unidentified)
	return ps
}

// open adds a connection.
func (ps *peers) open(fd int) {
	ps.close(fd) // if the event of an earlier connection's end was lost
	ps.last++
	c := &peer{id: ps.last, fd: fd, publishers: make(map[*publisher]struct{})}
	ps.byFD[fd], ps.byID[c.id] = c, c
}

// close removes a connection, and disconnects its publishers.
func (ps *peers) close(fd int) {
	c := ps.byFD[fd]
	if c == nil {
		return
	}
	delete(ps.byFD, fd)
	delete(ps.byID, c.id)
	for p := range c.publishers {
		p.worker.mu.Lock()
		p.disconnect(c.id)
		p.worker.updateConnections()
		p.worker.mu.Unlock()
	}
}

// descriptor returns the file descriptor of an open connection; noDescriptor if it is closed.
func (ps *peers) descriptor(id sequence.ConnectionID) int {
	if c := ps.byID[id]; c != nil {
		return c.fd
	}
	return noDescriptor
}

// arrive passes a message's batch to its publisher. c is the connection of the message; nil if it is
// closed. The worker's mutex is held.
func (ps *peers) arrive(p *publisher, c *peer, in *intake, now time.Time) {
	current, other := p.machine.Connections()
	var id sequence.ConnectionID
	if c != nil {
		id = c.id
	}
	switch {
	case id == 0 && current == 0:
		p.worker.hasConnected = true
		p.worker.updateConnections()
	case id != 0 && id != current && id != other:
		if dropped := ps.byID[other]; dropped != nil {
			delete(dropped.publishers, p) // the machine keeps two connections
		}
		c.publishers[p] = struct{}{}
		p.connect(id, p.replayOf(c))
		p.worker.updateConnections()
	}
	p.arrive(in, now, id)
}
