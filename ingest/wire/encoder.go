package wire

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/tinylib/msgp/msgp"
)

// HashForm is how an Encoder writes block hashes.
type HashForm uint8

// The forms of block hashes.
const (
	// HashUnsigned is an integer, never negative.
	HashUnsigned HashForm = iota
	// HashSigned is an integer, negative for hashes from 1<<63 on.
	HashSigned
	// HashBytes is 32 bytes, the last 8 of which are the hash.
	HashBytes
)

// append appends a hash.
func (f HashForm) append(dst []byte, h uint64) []byte {
	switch f {
	case HashSigned:
		return msgp.AppendInt64(dst, int64(h))
	case HashBytes:
		var b [32]byte
		for k := range 24 {
			b[k] = byte(k + 1) // the rest of a digest, which readers ignore
		}
		binary.BigEndian.PutUint64(b[24:], h)
		return msgp.AppendBytes(dst, b[:])
	default:
		return msgp.AppendUint64(dst, h)
	}
}

// Encoder encodes batches as engines do, each number in its shortest form. The zero
// value writes arrays as vLLM does.
type Encoder struct {
	// BatchForm and EventForm are the forms of batches and of events. Events of AIBrix
	// and Mooncake are maps whatever EventForm is.
	BatchForm Form
	EventForm Form
	// Mixed writes every second event in the other form.
	Mixed    bool
	Producer Producer
	Hashes   HashForm
	// Fields is the largest number of elements in an array store, its tag included, as
	// older versions have fewer: 5 to 13, or 0 for all. Removes lack what stores of
	// that version lack.
	Fields int
}

// AppendBatch appends the batch to dst: its time, rank and publisher id, and its events
// with their fields up to Rare. It decodes to an equal batch, except for Index, which
// counts from 0, and for what array events of fewer Fields leave out.
//
// A batch that cannot be encoded is refused with an *EncodeError, and dst is returned
// unchanged. So is one with fields that the Encoder's form lacks:
//
//   - Array events have no Locality, Ownership, ModelName, Time, MMKeys, Origin or
//     RemainingCopies. Only SGLang's have CacheSalt and SessionID, but neither LoRAName
//     nor the fields after it; only Dynamo's have BlockMMInfos. Removes in arrays have
//     neither SpecKind nor SlidingWindow.
//   - EAGLE tokens are written as pairs, at least one; opaque ones as one placeholder.
//     AIBrix has neither, and the length of its first block is the BlockSize, which is
//     0 where there are no tokens.
//   - ExtraKeys and the other raw values must each be one well-formed list, strings
//     UTF-8, and times finite and at most 1e11 seconds.
func (e *Encoder) AppendBatch(dst []byte, b *Batch) ([]byte, error) {
	if err := e.check(b); err != nil {
		return dst, err
	}
	if e.BatchForm == FormMap {
		return e.appendMapBatch(dst, b), nil
	}
	return e.appendArrayBatch(dst, b), nil
}

func (e *Encoder) appendEvents(dst []byte, events []Event) []byte {
	dst = msgp.AppendArrayHeader(dst, uint32(len(events)))
	for k := range events {
		if e.inMap(k) {
			dst = e.appendMapEvent(dst, &events[k])
		} else {
			dst = e.appendArrayEvent(dst, &events[k])
		}
	}
	return dst
}

// appendArrayEvent appends every field that the producer declares, nil where not set.
func (e *Encoder) appendArrayEvent(dst []byte, ev *Event) []byte {
	keys := e.arrayFields(ev.Kind)
	dst = msgp.AppendArrayHeader(dst, uint32(1+len(keys)))
	dst = msgp.AppendString(dst, producers[e.Producer].tags.kinds[ev.Kind])
	for _, k := range keys {
		dst = fields[k].codec.append(dst, e, ev)
	}
	return dst
}

// appendMapEvent appends the fields that the producer always writes, and the others
// that are set.
func (e *Encoder) appendMapEvent(dst []byte, ev *Event) []byte {
	var room [numKeys]key
	keys := room[:0]
	for k := range key(numKeys) {
		f := &fields[k]
		switch {
		case !kindFields[ev.Kind].has(k) || f.mapKey == "":
		case k == keyBlockSize && e.Producer == ProducerAIBrix: // the length of the first block
		case f.presence != optional || f.codec.isSet(ev):
			keys = append(keys, k)
		}
	}
	tags := producers[e.Producer].tags
	dst = msgp.AppendMapHeader(dst, uint32(1+len(keys)))
	dst = msgp.AppendString(dst, tags.key)
	dst = msgp.AppendString(dst, tags.kinds[ev.Kind])
	return e.appendMembers(dst, keys, ev)
}

// appendMembers appends the keys and values of these fields.
func (e *Encoder) appendMembers(dst []byte, keys []key, ev *Event) []byte {
	for _, k := range keys {
		name := fields[k].mapKey
		if k == keyHashes {
			name = producers[e.Producer].tags.hashes
		}
		dst = fields[k].codec.append(msgp.AppendString(dst, name), e, ev)
	}
	return dst
}

// EncodeError is why a batch cannot be encoded.
type EncodeError struct {
	// Event is the index of the event in Batch.Events, or -1 for an error of the batch
	// or the Encoder.
	Event int
	// Field is the invalid field: of the Event, such as "Medium" or "Rare.Time", of the
	// Batch, or of the Encoder, such as "Encoder.Fields".
	Field string
	// Problem describes the error.
	Problem string
}

// Error names the event and the field, and describes the error.
func (e *EncodeError) Error() string {
	if e.Event < 0 {
		return fmt.Sprintf("encode batch: %s: %s", e.Field, e.Problem)
	}
	return fmt.Sprintf("encode batch: event %d: %s: %s", e.Event, e.Field, e.Problem)
}

// check returns why the batch cannot be encoded, or nil.
func (e *Encoder) check(b *Batch) error {
	field, problem := e.checkBatch(b)
	if problem != "" {
		return &EncodeError{Event: -1, Field: field, Problem: problem}
	}
	for k := range b.Events {
		if field, problem := e.checkEvent(&b.Events[k], k); problem != "" {
			return &EncodeError{Event: k, Field: field, Problem: problem}
		}
	}
	return nil
}

// checkBatch returns what is wrong with the Encoder or with the batch itself, and its
// field, or "".
func (e *Encoder) checkBatch(b *Batch) (field, problem string) {
	switch {
	case e.BatchForm > FormMap:
		return "Encoder.BatchForm", fmt.Sprintf("is %d, want FormArray or FormMap", e.BatchForm)
	case e.EventForm > FormMap:
		return "Encoder.EventForm", fmt.Sprintf("is %d, want FormArray or FormMap", e.EventForm)
	case e.Producer >= numProducers:
		return "Encoder.Producer", fmt.Sprintf("is %d, want a declared one", e.Producer)
	case e.Hashes > HashBytes:
		return "Encoder.Hashes", fmt.Sprintf("is %d, want a declared one", e.Hashes)
	case e.Fields != 0 && (e.Fields < minFields || e.Fields > maxFields):
		return "Encoder.Fields", fmt.Sprintf("is %d, want 0 or %d to %d", e.Fields, minFields, maxFields)
	case b == nil:
		return "Batch", "is nil"
	case b.HasTime && checkTime(b.Time) != "":
		return "Time", checkTime(b.Time)
	case b.PublisherID != nil && len(b.PublisherID) != PublisherIDBytes:
		return "PublisherID", fmt.Sprintf("has %d bytes, want %d", len(b.PublisherID), PublisherIDBytes)
	default:
		return "Events", checkLen(len(b.Events))
	}
}

// checkEvent returns what is wrong with the k-th event, and its field, or "".
func (e *Encoder) checkEvent(ev *Event, k int) (field, problem string) {
	if ev.Kind < KindStored || ev.Kind > KindCleared {
		return "Kind", fmt.Sprintf("is %d, want KindStored, KindRemoved or KindCleared", ev.Kind)
	}
	inMap := e.inMap(k)
	known := e.fieldsOf(ev.Kind, inMap)
	for k := range key(numKeys) {
		f := &fields[k]
		if f.codec == nil {
			continue
		}
		if known.has(k) {
			problem = f.codec.check(e, ev)
		} else if f.codec.isSet(ev) {
			problem = e.describe(ev.Kind, inMap) + " has no such field"
		}
		if problem != "" {
			return f.goName, problem
		}
	}
	return "", ""
}

// checkLen returns what is wrong with a list or string of that length, or "".
func checkLen(n int) string {
	if uint64(n) > math.MaxUint32 {
		return fmt.Sprintf("has %d elements, more than MessagePack can count", n)
	}
	return ""
}

// checkTime returns what is wrong with a time, which must decode to itself, or "".
func checkTime(t float64) string {
	if math.IsNaN(t) || math.IsInf(t, 0) || t > maxSeconds {
		return fmt.Sprintf("is %v, want at most %v seconds: more are milliseconds", t, float64(maxSeconds))
	}
	return ""
}

// checkBlockSize returns what is wrong with a store's block size, or "".
func checkBlockSize(e *Encoder, ev *Event) string {
	const reason = "the first block's length is the block size"
	switch n := len(ev.Tokens); {
	case e.Producer != ProducerAIBrix:
	case n == 0 && ev.BlockSize != 0:
		return fmt.Sprintf("is %d, want 0 where there are no tokens: %s", ev.BlockSize, reason)
	case n > 0 && (ev.BlockSize == 0 || uint64(ev.BlockSize) > uint64(n)):
		return fmt.Sprintf("is %d, want 1 to %d, the number of tokens: %s", ev.BlockSize, n, reason)
	}
	return ""
}
