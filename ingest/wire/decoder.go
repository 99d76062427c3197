package wire

import (
	"math"
	"unsafe"
)

// Decoder reads batches. The zero value is ready; it is not for use by several
// goroutines at once.
//
// It reuses its memory, which grows to what the batches need and is never taken
// on the word of a length prefix: where there is too little, it is made to measure
// for what is really there. Once grown, decoding allocates nothing but strings that
// it has not seen lately. A batch beyond any engine's takes more, 16 bytes for one of
// the payload at worst, and the next Decode gives that back: 18 MiB is the most that
// stays.
type Decoder struct {
	p     []byte
	batch Batch
	// events is the memory of the batch's events as far as it may hold any, those
	// of earlier batches included: they must not keep what they point to.
	events []Event
	hashes slab[uint64]
	// tokens holds the remaining copies of removes as well.
	tokens slab[uint32]
	// raws and rares are what stands apart from events; apart tells whether any does.
	raws  slab[Raw]
	rares slab[Rare]
	apart bool
	// names are the few strings that come over and over, ids those that change
	// with the request and would push them out.
	names interner
	ids   interner
	// last are the names read last, by key: mostly the next one is the same.
	last [numKeys]string
	// after is which key followed each key last, in maps: an engine always writes
	// them in the same order.
	after [numKeys]key
	// lists is how the tokens of the event at hand were nested.
	lists lists
}

// maxKept is how much a Decoder keeps from one batch to the next of each that it
// fills, in bytes: the events, those it skipped, hashes and tokens. A step of
// 128 K tokens that evicts as much, each block in an event of its own, needs
// less.
const maxKept = 4 << 20

// maxRareKept is maxKept for the fields that stand apart from events, and what is
// rare.
const maxRareKept = 1 << 20

// Decode reads the batch that is payload. The batch and all it points to are
// the Decoder's memory, good until its next Decode; the raw MessagePack in it
// is part of payload, which must stay as it is as long as the batch is used.
// Strings may be kept.
//
// An error is an Error; events that are wrong by themselves are listed in
// Batch.Skipped.
func (d *Decoder) Decode(payload []byte) (*Batch, error) {
	d.p = payload
	if cap(d.events) > maxKept/int(unsafe.Sizeof(Event{})) {
		d.events = nil
	}
	d.batch = Batch{Events: d.events[:0], Skipped: reuse(d.batch.Skipped, maxKept/int(unsafe.Sizeof(Skip{})))}
	d.release()
	end, f := d.readBatch()
	if f == 0 && end != len(payload) {
		f = trailingBytes
	}
	d.p = nil
	if f != 0 {
		d.batch.PublisherID = nil
		d.forget(0)
		d.release()
		return nil, Error(f)
	}
	d.forget(len(d.batch.Events))
	return &d.batch, nil
}

// release takes back what events point to.
func (d *Decoder) release() {
	d.hashes.release(maxKept / 8)
	d.tokens.release(maxKept / 4)
	if d.apart {
		d.apart = false
		d.raws.clear(maxRareKept / int(unsafe.Sizeof(Raw{})))
		d.rares.clear(maxRareKept / int(unsafe.Sizeof(Rare{})))
	}
}

// forget clears the memory of events beyond the first n.
func (d *Decoder) forget(n int) {
	if n < len(d.events) {
		clear(d.events[n:])
		d.events = d.events[:n]
	}
}

// readBatch reads the batch and returns where it ends.
func (d *Decoder) readBatch() (int, fault) {
	class, n, i, f := readNest(d.p, 0)
	if f != 0 {
		return 0, f
	}
	switch class {
	case classArray:
		d.batch.Form = FormArray
		return d.readArrayBatch(n, i)
	case classMap:
		d.batch.Form = FormMap
		return d.readMapBatch(n, i)
	default:
		return 0, badBatchShape
	}
}

// readArrayBatch reads [ts, events, dp_rank, publisher_id, ...].
func (d *Decoder) readArrayBatch(n, i int) (int, fault) {
	if n < 2 {
		return i, badBatchShape
	}
	i, f := d.readTime(i)
	if f == 0 {
		i, f = d.readEvents(i)
	}
	if f == 0 && n > 2 {
		i, f = d.readRank(i)
	}
	if f == 0 && n > 3 {
		i, f = d.readPublisherID(i)
	}
	for k := 4; k < n && f == 0; k++ {
		i, f = skip(d.p, i, 1)
	}
	return i, f
}

// readMapBatch reads {"ts", "events", "data_parallel_rank", "publisher_id"}.
func (d *Decoder) readMapBatch(n, i int) (int, fault) {
	found := false
	for range n {
		var f fault
		name := glanceString(d.p, i)
		if name != nil {
			i += 1 + len(name)
		} else if name, i, f = readString(d.p, i, 1); f != 0 {
			return i, f
		}
		if name != nil {
			switch string(name) {
			case "ts":
				i, f = d.readTime(i)
				if f != 0 {
					return i, f
				}
				continue
			case "events":
				i, f = d.readEvents(i)
				if f != 0 {
					return i, f
				}
				found = true
				continue
			case "data_parallel_rank", "attn_dp_rank":
				i, f = d.readRank(i)
				if f != 0 {
					return i, f
				}
				continue
			case "publisher_id":
				i, f = d.readPublisherID(i)
				if f != 0 {
					return i, f
				}
				continue
			}
		}
		if f == 0 {
			i, f = skip(d.p, i, 1)
		}
		if f != 0 {
			return i, f
		}
	}
	if !found {
		return i, badBatchShape
	}
	return i, 0
}

func (d *Decoder) readTime(i int) (int, fault) {
	if bits, ok := glance64(d.p, i, 0xcb); ok {
		// Neither too large nor NaN.
		if t := math.Float64frombits(bits); math.Abs(t) <= maxSeconds {
			d.batch.Time, d.batch.HasTime = t, true
			return i + 9, 0
		}
	}
	v, f := readValue(d.p, i)
	if f != 0 {
		return i, f
	}
	if v.class == classNil {
		d.batch.Time, d.batch.HasTime = 0, false
		return v.at, 0
	}
	t, ok := v.float()
	if !ok {
		return i, badBatchShape
	}
	d.batch.Time, d.batch.HasTime = seconds(t)
	if !d.batch.HasTime {
		return i, badTS
	}
	return v.at, 0
}

// maxSeconds is the time above which a number must be milliseconds: in seconds
// it is the year 5138.
const maxSeconds = 1e11

// seconds returns an engine's time in seconds, and whether it is a time at all.
func seconds(t float64) (float64, bool) {
	if math.IsNaN(t) || math.IsInf(t, 0) {
		return 0, false
	}
	if t > maxSeconds {
		t /= 1000
	}
	return t, true
}

func (d *Decoder) readRank(i int) (int, fault) {
	if i < len(d.p) && d.p[i] <= 0x7f {
		d.batch.Rank, d.batch.HasRank = uint32(d.p[i]), true
		return i + 1, 0
	}
	v, f := readValue(d.p, i)
	if f != 0 {
		return i, f
	}
	switch {
	case v.class == classNil:
		d.batch.Rank, d.batch.HasRank = 0, false
	case v.class == classUint && v.bits <= math.MaxUint32:
		d.batch.Rank, d.batch.HasRank = uint32(v.bits), true
	default:
		return i, badBatchShape
	}
	return v.at, 0
}

// readPublisherID reads who published the batch. Anything but an id is skipped: an
// element that is not known here may stand in that place.
func (d *Decoder) readPublisherID(i int) (int, fault) {
	d.batch.PublisherID = nil
	v, f := readValue(d.p, i)
	if f != 0 {
		return i, f
	}
	if end := v.at + v.n; v.class == classBin && v.n == PublisherIDBytes {
		d.batch.PublisherID = d.p[v.at:end:end]
		return end, 0
	}
	return skip(d.p, i, 1)
}

func (d *Decoder) readEvents(i int) (int, fault) {
	class, n, i, f := readNest(d.p, i)
	if f != 0 {
		return i, f
	}
	if class != classArray {
		return i, badBatchShape
	}
	// A map may name its events twice: the last ones count.
	d.batch.Events = d.batch.Events[:0]
	d.batch.Skipped = d.batch.Skipped[:0]
	for k := range n {
		i, f = d.readEvent(i, k, n-k)
		if f != 0 {
			return i, f
		}
	}
	return i, 0
}

// readEvent reads the event at i, or leaves it out, and returns where it ends.
// left counts it and those that are said to follow.
func (d *Decoder) readEvent(i, index, left int) (int, fault) {
	class, n, end, f := readNest(d.p, i)
	if f != 0 {
		return i, f
	}
	switch class {
	case classArray:
		end, f = d.readArrayEvent(d.newEvent(index, left, i), n, end)
	case classMap:
		end, f = d.readMapEvent(d.newEvent(index, left, i), n, end)
	default:
		f = badEventShape
	}
	if f == 0 {
		return end, 0
	}
	if f.rejects() {
		return end, f
	}
	if n := len(d.batch.Events); n > 0 && d.batch.Events[n-1].Index == index {
		d.batch.Events = d.batch.Events[:n-1]
	}
	return d.skipEvent(Skip{Index: index, Reason: f.reason()}, left, i)
}

// newEvent adds the event at i to the batch. left counts it and those that are
// said to follow.
func (d *Decoder) newEvent(index, left, i int) *Event {
	n := len(d.batch.Events)
	if n == cap(d.batch.Events) {
		// One more for those that turn out bad one after the other.
		all, large := d.count(i, left)
		grown := make([]Event, n, n+min(large+1, all))
		copy(grown, d.batch.Events)
		d.batch.Events = grown
	}
	d.batch.Events = d.batch.Events[:n+1]
	if n >= len(d.events) {
		d.events = d.batch.Events
	}
	ev := &d.batch.Events[n]
	*ev = Event{Index: index}
	return ev
}

// skipEvent notes that the event at i is left out, and returns where it ends.
func (d *Decoder) skipEvent(s Skip, left, i int) (int, fault) {
	if n := len(d.batch.Skipped); n == cap(d.batch.Skipped) {
		all, _ := d.count(i, left)
		grown := make([]Skip, n, n+all)
		copy(grown, d.batch.Skipped)
		d.batch.Skipped = grown
	}
	d.batch.Skipped = append(d.batch.Skipped, s)
	return skip(d.p, i, 2)
}

// minEventBytes is the size of the smallest event: a BlockRemoved of no blocks.
const minEventBytes = 15

// count counts the event at i and those after it, left being how many are said to
// be there, and how many of them are not too small to be events. Room is made for
// these alone, and once in a batch: an Event takes many times the bytes that make
// the smallest.
func (d *Decoder) count(i, left int) (all, large int) {
	for all < left {
		end, f := skip(d.p, i, 2)
		all++
		if f != 0 {
			break // the batch is about to be rejected
		}
		if end-i >= minEventBytes {
			large++
		}
		i = end
	}
	return all, large
}
