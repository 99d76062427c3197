package simulator

import (
	"fmt"
	"slices"

	"github.com/kvcast/kvcast/ingest/wire"
)

// feed is what comes out of an engine: batches, numbered, remembered, sent, or held
// back. It is for the goroutine of its sockets.
type feed struct {
	*sockets
	encoder encoder
	next    uint64       // the seq of the next batch
	held    []remembered // in the order in which they were held back
}

// add gives events the next seq, and remembers the batch if it is to. Events that
// cannot be encoded take no seq.
func (f *feed) add(events []wire.Event, remember bool) (remembered, error) {
	payload, err := f.encoder.encode(events)
	if err != nil {
		return remembered{}, err
	}
	b := remembered{f.next, payload}
	f.next++
	if remember {
		f.memory.add(b.seq, b.payload)
	}
	return b, nil
}

// transmit sends a batch live.
func (f *feed) transmit(b remembered) error { return f.publish(b.seq, b.payload) }

// hold keeps a batch from being sent until it is released.
func (f *feed) hold(b remembered) { f.held = append(f.held, b) }

// release sends the batches with these seqs in this order, or all that are held in
// theirs. Where one is not held none is sent.
func (f *feed) release(seqs ...uint64) error {
	out, left := slices.Clone(f.held), []remembered(nil)
	if len(seqs) > 0 {
		out, left = nil, slices.Clone(f.held)
		for _, seq := range seqs {
			i := slices.IndexFunc(left, func(b remembered) bool { return b.seq == seq })
			if i < 0 {
				return fmt.Errorf("release batch %d: it is not held back", seq)
			}
			out, left = append(out, left[i]), slices.Delete(left, i, i+1)
		}
	}
	f.held = left
	for _, b := range out {
		if err := f.transmit(b); err != nil {
			return err
		}
	}
	return nil
}

// restart lets the engine begin anew behind the sockets as they are.
func (f *feed) restart(seq uint64) {
	f.memory.clear()
	f.next = seq
	f.silent, f.faults = false, ReplayFaults{}
}
