package ingest

import (
	"net/netip"
	"time"

	"github.com/kvcast/kvcast/ingest/internal/sequence"
)

// peer is a connection to a listener. The transport identifies it by a number; after the connection is
// closed another may have the same number.
type peer struct {
	id   sequence.ConnectionID
	conn int
	// address is set by the first message. It is invalid before, and if the peer has none.
	address netip.Addr
	// publishers are the publishers that have this connection: see Machine.Connections.
	publishers map[*publisher]struct{}
}

// peers are a listener's open connections. They are guarded by the listener's mutex.
type peers struct {
	byConn map[int]*peer
	byID   map[sequence.ConnectionID]*peer
	last   sequence.ConnectionID // the id of the newest connection
}

const (
	// unidentified is the number of all connections that the transport does not identify. They count as one connection, which is never closed.
	unidentified = -1
	// noConn is the number of no connection.
	noConn = -2
)

func newPeers() peers {
	ps := peers{byConn: make(map[int]*peer), byID: make(map[sequence.ConnectionID]*peer)}
	ps.open(unidentified)
	return ps
}

// open adds a connection.
func (ps *peers) open(conn int) {
	ps.close(conn) // if the event of an earlier connection's end was lost
	ps.last++
	c := &peer{id: ps.last, conn: conn, publishers: make(map[*publisher]struct{})}
	ps.byConn[conn], ps.byID[c.id] = c, c
}

// close removes a connection, and disconnects its publishers.
func (ps *peers) close(conn int) {
	c := ps.byConn[conn]
	if c == nil {
		return
	}
	delete(ps.byConn, conn)
	delete(ps.byID, c.id)
	for p := range c.publishers {
		p.worker.mu.Lock()
		p.disconnect(c.id)
		p.worker.updateConnections()
		p.worker.mu.Unlock()
	}
}

// number returns the transport's number of an open connection; noConn if it is closed.
func (ps *peers) number(id sequence.ConnectionID) int {
	if c := ps.byID[id]; c != nil {
		return c.conn
	}
	return noConn
}

// arrive passes a message's batch to its publisher. c is the connection of the message; nil if it is closed. The worker's mutex is held.
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
		p.connect(sequence.Connection{ID: id, Replay: p.replayOf(c)})
		p.worker.updateConnections()
	}
	p.arrive(in, now, id)
}
