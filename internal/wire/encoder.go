package wire

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/tinylib/msgp/msgp"
)

// Encoder encodes batches as vLLM does, each number in its shortest encoding. The zero
// value writes arrays.
type Encoder struct {
	// BatchForm and EventForm are the forms of batches and of their events; 0 means
	// FormArray.
	BatchForm, EventForm Form
}

// AppendBatch appends the batch to dst: its time, rank and publisher id, and its events
// with their fields up to Rare. The result decodes to an equal batch, except for Index,
// which counts from 0.
//
// A batch that cannot be encoded is rejected with an error that names the event and the field,
// and dst is returned unchanged. That includes a batch with fields that the Encoder's form lacks:
//
//   - Array events have no CacheSalt, SessionID, Locality, Ownership, ModelName, HasObjectKey, Time,
//     BlockMMInfos, MMKeys, Origin or RemainingCopies. Removes in arrays have neither
//     SpecKind nor SlidingWindow.
//   - EAGLE tokens are encoded as pairs, at least one; opaque tokens as one placeholder.
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
		ev := &events[k]
		keys := e.layoutOf(ev).keys
		if e.EventForm == FormMap {
			dst = appendMapEvent(dst, ev, keys)
		} else {
			dst = appendArrayEvent(dst, ev, keys)
		}
	}
	return dst
}

// appendArrayEvent appends all of the fields, nil where not set.
func appendArrayEvent(dst []byte, ev *Event, keys []key) []byte {
	dst = msgp.AppendArrayHeader(dst, uint32(1+len(keys)))
	dst = msgp.AppendString(dst, vllmTags[ev.Kind])
	for _, k := range keys {
		dst = fields[k].codec.append(dst, ev)
	}
	return dst
}

// appendMapEvent appends the fields that vLLM always writes, and the others that are set.
func appendMapEvent(dst []byte, ev *Event, keys []key) []byte {
	var room [numKeys]key
	written := room[:0]
	for _, k := range keys {
		if f := &fields[k]; f.presence != optional && ev.Kind != KindCleared || f.codec.isSet(ev) {
			written = append(written, k)
		}
	}
	dst = msgp.AppendMapHeader(dst, uint32(1+len(written)))
	dst = msgp.AppendString(dst, fields[keyType].mapKey)
	dst = msgp.AppendString(dst, vllmTags[ev.Kind])
	for _, k := range written {
		dst = fields[k].codec.append(msgp.AppendString(dst, fields[k].mapKey), ev)
	}
	return dst
}

// layout lists the fields that events of one kind have in one form.
type layout struct {
	// keys are the fields that may be written, in order.
	keys []key
	// checked are the fields that may have values which cannot be encoded, and missing the
	// fields that the form lacks.
	checked, missing []key
}

// layoutOf returns the layout of an event in the Encoder's form.
func (e *Encoder) layoutOf(ev *Event) *layout {
	if ev.Raw == nil && ev.Rare == nil {
		return &plainLayouts[e.EventForm][ev.Kind]
	}
	return &layouts[e.EventForm][ev.Kind]
}

// plainLayouts are layouts of events without Raw and Rare: looking into them would take
// most of the time of encoding a small event.
var (
	layouts      = newLayouts(func(key) bool { return true })
	plainLayouts = newLayouts(func(k key) bool { return !strings.Contains(fields[k].goName, ".") })
)

// newLayouts returns layouts by form, of which 0 is FormArray, and by kind. Fields that are
// not included are unset in all events.
func newLayouts(included func(key) bool) (all [FormMap + 1][KindCleared + 1]layout) {
	for kind := KindStored; kind <= KindCleared; kind++ {
		array, inMap := &all[FormArray][kind], &all[FormMap][kind]
		array.keys = vllmArrays[kind]
		for k := range key(numKeys) {
			f := &fields[k]
			if f.codec == nil || !included(k) {
				continue
			}
			inKind := kindFields[kind].has(k)
			if inKind && f.mapKey != "" {
				inMap.keys = append(inMap.keys, k)
			}
			// Fields without a key are properties of the tokens.
			array.add(k, inKind && f.mapKey == "" || slices.Contains(array.keys, k))
			inMap.add(k, inKind)
		}
		all[0][kind] = *array
	}
	return all
}

// add adds a field, which the form may have.
func (l *layout) add(k key, has bool) {
	if !has {
		l.missing = append(l.missing, k)
	} else if _, ok := fields[k].codec.(checker); ok {
		l.checked = append(l.checked, k)
	}
}

// check returns why the batch cannot be encoded, or nil.
func (e *Encoder) check(b *Batch) error {
	if field, problem := e.checkBatch(b); problem != "" {
		return fmt.Errorf("encode batch: %s: %s", field, problem)
	}
	for k := range b.Events {
		if field, problem := e.checkEvent(&b.Events[k]); problem != "" {
			return fmt.Errorf("encode batch: event %d: %s: %s", k, field, problem)
		}
	}
	return nil
}

// checkBatch returns an invalid field of the Encoder or of the batch itself, and the
// problem; both are empty if there is none.
func (e *Encoder) checkBatch(b *Batch) (field, problem string) {
	switch {
	case e.BatchForm > FormMap:
		return "Encoder.BatchForm", fmt.Sprintf("is %d, want FormArray or FormMap", e.BatchForm)
	case e.EventForm > FormMap:
		return "Encoder.EventForm", fmt.Sprintf("is %d, want FormArray or FormMap", e.EventForm)
	case b == nil:
		return "Batch", "is nil"
	case b.HasTime && checkTime(b.Time) != "":
		return "Time", checkTime(b.Time)
	case b.PublisherID != nil && len(b.PublisherID) != PublisherIDBytes:
		return "PublisherID", fmt.Sprintf("has %d bytes, want %d", len(b.PublisherID), PublisherIDBytes)
	default:
		return "", ""
	}
}

// checkEvent returns an invalid field of the event, and the problem; both are empty if
// there is none.
func (e *Encoder) checkEvent(ev *Event) (field, problem string) {
	if ev.Kind < KindStored || ev.Kind > KindCleared {
		return "Kind", fmt.Sprintf("is %d, want KindStored, KindRemoved or KindCleared", ev.Kind)
	}
	l := e.layoutOf(ev)
	for _, k := range l.missing {
		if fields[k].codec.isSet(ev) {
			form := "an array"
			if e.EventForm == FormMap {
				form = "a map"
			}
			return fields[k].goName, fmt.Sprintf("is set, but a %s event in %s has no such field", kindNames[ev.Kind], form)
		}
	}
	for _, k := range l.checked {
		if problem := fields[k].codec.(checker).check(ev); problem != "" {
			return fields[k].goName, problem
		}
	}
	return "", ""
}

// checkTime returns why a time would not decode to itself, or "".
func checkTime(t float64) string {
	if math.IsNaN(t) || math.IsInf(t, 0) || t > maxSeconds {
		return fmt.Sprintf("is %v, want at most %v seconds: larger times are read as milliseconds", t, float64(maxSeconds))
	}
	return ""
}
