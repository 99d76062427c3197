//go:build cgo

package libzmq

import "net/netip"

// Events of a Monitor.
var (
	ConnectEvents = connectEvents
	BindEvents    = bindEvents
)

// Send is send.
func (s *Socket) Send(frames [][]byte) error { return s.send(frames) }

// MaxBatchBytes is the size from which on a Batch is full.
const MaxBatchBytes = maxBatchBytes

// Peer is peer.
func (b *Batch) Peer(i int) netip.Addr { return b.peer(i) }
