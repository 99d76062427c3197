package ingest

import (
	"bytes"
	"time"
	"unsafe"

	"github.com/kvcast/kvcast/internal/budget"
)

// Bounds of what is held back while batches before it are fetched. Beyond them
// a live batch is let go, and fetched as well when the others have been. All
// publishers together have Config.ReorderBufferBytes.
const (
	maxHeldBatches = 10_000   // of a publisher: as many as an engine remembers
	maxHeldBytes   = 16 << 20 // of a publisher
)

// held is a live batch that waits.
type held struct {
	// epoch and publisher are those of the arrival.
	epoch     []byte
	publisher []byte
	seq       uint64
	payload   []byte
	// eventless reports whether the batch decodes, and has no events.
	eventless bool
	at        time.Time
	// connection is the one that it came by; see publisher.connection.
	connection uint32
	print      fingerprint
}

// heldOverhead is what a batch takes beside its bytes: its place in a slice that doubles
// as it grows, and what the allocator rounds up of each of its parts.
const heldOverhead = 2*int(unsafe.Sizeof(held{})) + 3*16

// size is what a batch that is held back takes, in bytes.
func (b *held) size() int { return len(b.epoch) + len(b.publisher) + len(b.payload) + heldOverhead }

// holding is a publisher's live batches that wait for a repair, in the order in
// which they came. It is bounded: what does not fit is the caller's to fetch again.
type holding struct {
	batches []held
	bytes   int
	// marked are those, from the first on, that were there at the last mark.
	marked int
	budget *budget.Budget
}

// mark marks those that are there.
func (h *holding) mark() { h.marked = len(h.batches) }

// add keeps a copy of a batch, and tells whether there was room.
func (h *holding) add(a *arrival, at time.Time, connection uint32) bool {
	b := held{
		epoch: a.epoch, publisher: a.publisher, seq: a.seq, payload: a.payload, eventless: a.eventless(),
		at: at, connection: connection, print: a.print,
	}
	n := b.size()
	if len(h.batches) >= maxHeldBatches || h.bytes+n > maxHeldBytes || !h.budget.Take(int64(n)) {
		return false
	}
	h.bytes += n
	b.epoch, b.publisher, b.payload = bytes.Clone(b.epoch), bytes.Clone(b.publisher), bytes.Clone(b.payload)
	h.batches = append(h.batches, b)
	return true
}

// first returns the batch that came first; nil where there is none.
func (h *holding) first() *held {
	if len(h.batches) == 0 {
		return nil
	}
	return &h.batches[0]
}

// release gives back what a batch is counted for.
func (h *holding) release(b *held) {
	n := b.size()
	h.bytes -= n
	h.budget.Release(int64(n))
}

// drop lets the first one go.
func (h *holding) drop() {
	h.release(&h.batches[0])
	h.batches[0] = held{}
	h.batches = h.batches[1:]
	h.marked = max(0, h.marked-1)
	if len(h.batches) == 0 {
		h.batches = nil
	}
}

// dropBefore lets those go that came by an earlier connection, and returns how
// many.
func (h *holding) dropBefore(connection uint32) (n int) {
	for f := h.first(); f != nil && f.connection != connection; f = h.first() {
		h.drop()
		n++
	}
	return n
}

// dropOthers drops the batches of other incarnations.
func (h *holding) dropOthers(id *identity) {
	kept := h.batches
	h.batches = nil
	h.marked = 0
	for i := range kept {
		if id.contradicts(&arrival{epoch: kept[i].epoch, publisher: kept[i].publisher}) {
			h.release(&kept[i])
		} else {
			h.batches = append(h.batches, kept[i])
		}
	}
}

// clear lets all go.
func (h *holding) clear() {
	for h.first() != nil {
		h.drop()
	}
}
