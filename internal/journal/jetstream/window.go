package jetstream

import (
	"bytes"
	"slices"

	"github.com/nats-io/nats.go"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/entry"
)

// window has the appends in flight, oldest first. Their seqs are contiguous and start after the last acknowledged one.
type window struct {
	acked    uint64 // last acknowledged seq
	appends  []*inFlight
	sent     int    // appends[:sent] were published in this attempt
	everSent int    // appends[:everSent] were published in any attempt, so the stream may have them
	singly   uint64 // appends up to this seq are published with an answer each
	attempt  uint64 // grows each time the appends in flight are published again
}

// inFlight is an append that is not acknowledged yet.
type inFlight struct {
	record      journal.Record // without State
	message     *nats.Msg
	ack         *journal.Ack
	received    bool // the stream has acknowledged it
	isOwnership bool // it is no entry of the caller, but an ownership record
}

// newInFlight returns the append of a record as a message, so that the caller may reuse the memory of the record.
func newInFlight(r journal.Record, m *nats.Msg) *inFlight {
	r.Body, r.State = m.Data[:len(r.Body)], nil
	return &inFlight{record: r, message: m, ack: new(journal.Ack)}
}

// push adds an append.
func (w *window) push(a *inFlight) { w.appends = append(w.appends, a) }

// next returns the appends to publish, at most limit, and the seq of the first, and marks them as published. The caller may
// use them while others change the window: an earlier attempt may be acknowledged meanwhile.
func (w *window) next(limit int) ([]*inFlight, uint64) {
	from := w.sent
	w.sent = min(len(w.appends), max(from, from+min(limit, len(w.appends))))
	w.everSent = max(w.sent, w.everSent)
	return slices.Clone(w.appends[from:w.sent]), w.acked + uint64(from) + 1
}

// receive marks the append of a seq as acknowledged. Acknowledgements of earlier entries come again after a reconnection; they are ignored.
func (w *window) receive(seq uint64) {
	if seq > w.acked && seq-w.acked <= uint64(len(w.appends)) {
		w.appends[seq-w.acked-1].received = true
	}
}

// pop removes and returns the oldest append if it is acknowledged, with its seq.
func (w *window) pop() (*inFlight, uint64) {
	if len(w.appends) == 0 || !w.appends[0].received {
		return nil, 0
	}
	a := w.appends[0]
	w.appends[0] = nil
	w.appends = w.appends[1:]
	w.acked++
	w.sent, w.everSent = max(w.sent-1, 0), max(w.everSent-1, 0)
	return a, w.acked
}

// retry makes all appends that are left be published again.
func (w *window) retry() {
	w.attempt++
	w.sent = 0
}

// equal reports whether a stored message is the one that was published for an append.
func (a *inFlight) equal(subject string, h nats.Header, data []byte) bool {
	return subject == a.message.Subject && h.Get(entry.Header) == a.message.Header.Get(entry.Header) && bytes.Equal(data, a.message.Data)
}
