package ingest

import (
	"net/netip"
	"time"
)

// peer is a connection to a listener. libzmq names it by its file descriptor, in
// the events about it and in its messages; the number may be another connection's
// later.
type peer struct {
	fd int
	// address is invalid until the first message came, and where it has none, as over
	// ipc.
	address     netip.Addr
	addressless bool
	// publishers are those that were last read by it, or before, while both are open.
	publishers map[*publisher]struct{}
}

// peers are a listener's open connections, by file descriptor. They are guarded
// by the listener's mutex.
type peers map[int]*peer

// unknown is the descriptor of all connections that libzmq does not name. They
// count as one that never closes.
const unknown = -1

// noDescriptor is that of no connection.
const noDescriptor = -2

func newPeers() peers {
	ps := make(peers)
	ps.opened(unknown)
	return ps
}

// descriptor is that of a connection; no connection's where it is nil.
func (c *peer) descriptor() int {
	if c == nil {
		return noDescriptor
	}
	return c.fd
}

// opened takes note of a connection.
func (ps peers) opened(fd int) {
	ps[fd] = &peer{fd: fd, publishers: make(map[*publisher]struct{})}
}

// closed takes note of a connection's end: what was read by it has none any more,
// unless it has another.
func (ps peers) closed(fd int, now time.Time) {
	c := ps[fd]
	if c == nil {
		return
	}
	delete(ps, fd)
	for p := range c.publishers {
		w := p.worker
		w.mu.Lock()
		p.part(c, now)
		w.connections()
		w.mu.Unlock()
	}
}

// come takes note that a message of the publisher came by a connection: nil where
// that is closed already. Where it is not the one of before, the engine may have
// missed batches to send, or be another one.
func (p *publisher) come(in *intake, c *peer, now time.Time) {
	switch {
	case p.peer == c && (c != nil || p.connection > 0):
		return
	case c == nil:
		p.connection = max(p.connection, 1)
		if !p.connected {
			p.beginAbsence()
		}
		p.worker.reached = true
		p.worker.connections()
		return
	case c == p.rival:
		p.peer, p.rival = c, p.peer
		p.replayFrom(c.address)
		if !p.rivals.mixing {
			p.ambiguous(in, now, p.seq.last)
		}
		return
	}
	if p.rival != nil {
		delete(p.rival.publishers, p)
	}
	c.publishers[p] = struct{}{}
	p.peer, p.rival = c, p.peer
	p.replayFrom(c.address)
	p.connect(now)
	p.worker.connections()
}

// part takes note that a connection is closed.
func (p *publisher) part(c *peer, now time.Time) {
	switch c {
	case p.rival:
		p.rival = nil
	case p.peer:
		p.peer, p.rival = p.rival, nil
		if p.peer == nil {
			p.disconnect()
			return
		}
		p.replayFrom(p.peer.address)
	default:
		return
	}
	if p.rivals.mixing {
		p.parted(now, p.rivals.left(p.peer))
	}
}
