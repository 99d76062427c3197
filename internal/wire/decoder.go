package wire

import (
	"unsafe"
)

// Decoder decodes batches. The zero value is ready. It is not safe for concurrent use.
//
// The Decoder reuses its memory, which grows with the batches. It never allocates what a length prefix declares: a list that does not fit
// is allocated after its elements are known to be present. When the memory has grown, decoding allocates only strings that were not seen
// recently. The worst payloads need 16 bytes per byte of the payload, and no batch of at most 8 MiB needs more than 64 MiB. The next Decode frees memory beyond 18 MiB, more than the batches of
// any engine need.
type Decoder struct {
	p     []byte
	batch Batch
	// events is the memory of Batch.Events. Unused events in it are zero, so that they do not reference an earlier payload.
	events []Event
	hashes slab[uint64]
	// tokens allocates the remaining copies of removes as well.
	tokens slab[uint32]
	raws   slab[Raw]
	rares  slab[Rare]
	// names caches strings that repeat, ids strings that change with the request.
	names interner
	ids   interner
	// last is the most recent string of each field.
	last [numKeys]string
	// after is the key that followed each key most recently in a map event: an engine always writes keys in the same order.
	after [numKeys]key
	// nesting is the nesting of the current event's tokens.
	nesting nesting
}

const (
	// maxKept is how many bytes of each of events, skipped events, hashes and tokens a Decoder keeps from one batch to the next. An engine
	// step that stores 128 Ki tokens and removes as many, one block per event, needs less.
	maxKept = 4 << 20
	// maxRareKept is maxKept for Raw and Rare.
	maxRareKept = 1 << 20
	// maxLast is the length in bytes of the longest string in Decoder.last.
	maxLast = 1024
)

// Decode decodes the batch in payload. The batch and everything it points to are the Decoder's memory, valid until the next Decode; the
// encoded values in it are views of payload, which must not change while the batch is used. Strings may be kept.
//
// The error is an Error. An invalid event is no error: it is in Batch.Skipped.
func (d *Decoder) Decode(payload []byte) (*Batch, error) {
	return d.decode(payload, (*Decoder).readBatch)
}

func (d *Decoder) decode(payload []byte, read func(*Decoder) (end int, f fault)) (*Batch, error) {
	d.p = payload
	if cap(d.events) > maxKept/int(unsafe.Sizeof(Event{})) {
		d.events = nil
	}
	d.batch = Batch{Events: d.events[:0], Skipped: reuse(d.batch.Skipped, maxKept/int(unsafe.Sizeof(Skip{})))}
	d.release()
	end, f := read(d)
	if f == 0 && end != len(payload) {
		f = trailingBytes
	}
	d.p = nil
	if f != 0 {
		d.batch.PublisherID = nil
		d.clearEvents(0)
		d.release()
		if f >= reasonFault { // of a record
			f = badBatchShape
		}
		return nil, Error(f)
	}
	d.clearEvents(len(d.batch.Events))
	return &d.batch, nil
}

// release frees what the events of the last batch point to.
func (d *Decoder) release() {
	d.hashes.release(maxKept / 8)
	d.tokens.release(maxKept / 4)
	d.raws.clear(maxRareKept / int(unsafe.Sizeof(Raw{})))
	d.rares.clear(maxRareKept / int(unsafe.Sizeof(Rare{})))
}

// clearEvents clears the memory of events beyond the first n.
func (d *Decoder) clearEvents(n int) {
	if n < len(d.events) {
		clear(d.events[n:])
		d.events = d.events[:n]
	}
}

func (d *Decoder) readEvents(i int) (int, fault) {
	class, n, i, f := readHeader(d.p, i)
	if f != 0 {
		return i, f
	}
	if class != classArray {
		return i, badBatchShape
	}
	if n > MaxEvents {
		return i, tooManyEvents
	}
	// If a map has two lists of events, the last one counts.
	d.batch.Events = d.batch.Events[:0]
	d.batch.Skipped = d.batch.Skipped[:0]
	for k := 0; k < n && f == 0; k++ {
		i, f = d.readEvent(i, k, n-k)
	}
	return i, f
}

// readEvent reads the event at i, or skips it if it is invalid, and returns where it ends. left is the declared number of events from i on.
func (d *Decoder) readEvent(i, index, left int) (int, fault) {
	class, n, end, f := readHeader(d.p, i)
	if f != 0 {
		return i, f
	}
	events := len(d.batch.Events)
	switch class {
	case classArray:
		end, f = d.readArrayEvent(d.newEvent(index, left, i), n, end)
	case classMap:
		end, f = d.readMapEvent(d.newEvent(index, left, i), n, end, allFields)
	default:
		f = badEventShape
	}
	if f < reasonFault {
		return end, f
	}
	d.batch.Events = d.batch.Events[:events]
	if n := len(d.batch.Skipped); n == cap(d.batch.Skipped) {
		all, _ := d.countEvents(i, left)
		d.batch.Skipped = append(make([]Skip, 0, n+all), d.batch.Skipped...)
	}
	d.batch.Skipped = append(d.batch.Skipped, Skip{Index: index, Reason: f.reason()})
	return skip(d.p, i, eventDepth)
}

// newEvent adds the event at i to the batch. left is the declared number of events from i on.
func (d *Decoder) newEvent(index, left, i int) *Event {
	n := len(d.batch.Events)
	if n == cap(d.batch.Events) {
		// The extra element is for events that turn out to be invalid, one after the other.
		all, large := d.countEvents(i, left)
		d.batch.Events = append(make([]Event, 0, n+min(large+1, all)), d.batch.Events...)
	}
	d.batch.Events = d.batch.Events[:n+1]
	if n >= len(d.events) {
		d.events = d.batch.Events
	}
	ev := &d.batch.Events[n]
	*ev = Event{Index: index}
	return ev
}

// minEventBytes is the size of the smallest event: a BlockRemoved of no blocks.
const minEventBytes = 15

// countEvents counts the events from i on, of which left are declared. large is the number of events that are not too small to be valid.
// Memory is allocated only for large events, once per batch, because an Event takes many times the bytes of the smallest encoded event.
func (d *Decoder) countEvents(i, left int) (all, large int) {
	for all < left {
		end, f := skip(d.p, i, eventDepth)
		all++
		if f != 0 {
			break // the batch will be rejected
		}
		if end-i >= minEventBytes {
			large++
		}
		i = end
	}
	return all, large
}

// rawOf returns the event's raw fields for writing.
func (d *Decoder) rawOf(ev *Event) *Raw {
	if ev.Raw == nil {
		ev.Raw = d.raws.one()
	}
	return ev.Raw
}

// rareOf returns the event's rare fields for writing.
func (d *Decoder) rareOf(ev *Event) *Rare {
	if ev.Rare == nil {
		ev.Rare = d.rares.one()
	}
	return ev.Rare
}
