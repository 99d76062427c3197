package wire

import (
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// Encoder encodes batches as vLLM does, each number in its shortest encoding. The zero value writes arrays.
type Encoder struct {
	// BatchForm and EventForm are the forms of batches and of their events; 0 means FormArray.
	BatchForm, EventForm Form
}

// AppendBatch appends the batch to dst: its time, rank and publisher id, and its events with their fields up to Rare. The result decodes to
// an equal batch, except for Index, which counts from 0. The batch must be one that the Decoder may return, of whose fields some forms lack
// some:
//
//   - Array events have no CacheSalt, Note, Locality, Ownership, ModelName, HasObjectKey, Time,
//     BlockMMInfos, MMKeys, Origin or RemainingCopies. Removes in arrays have neither
//     SpecKind nor SlidingWindow.
//   - EAGLE tokens are encoded as pairs, at least one; opaque tokens as one placeholder.
//   - Times are at most MaxSeconds.
func (e *Encoder) AppendBatch(dst []byte, b *Batch) []byte {
	if e.BatchForm == FormMap {
		return e.appendMapBatch(dst, b)
	}
	return e.appendArrayBatch(dst, b)
}

func (e *Encoder) appendEvents(dst []byte, events []Event) []byte {
	dst = msgp.AppendArrayHeader(dst, uint32(len(events)))
	for k := range events {
		if e.EventForm == FormMap {
			dst = appendMapEvent(dst, &events[k])
		} else {
			dst = appendArrayEvent(dst, &events[k])
		}
	}
	return dst
}

// appendArrayEvent appends all of the fields, nil where not set.
func appendArrayEvent(dst []byte, ev *Event) []byte {
	keys := vllmArrays[ev.Kind]
	dst = msgp.AppendArrayHeader(dst, uint32(1+len(keys)))
	dst = msgp.AppendString(dst, vllmTags[ev.Kind])
	for _, k := range keys {
		dst = fields[k].codec.append(dst, ev)
	}
	return dst
}

// appendMapEvent appends the fields that vLLM always writes, and the others that are set.
func appendMapEvent(dst []byte, ev *Event) []byte {
	keys := mapKeys[ev.Kind]
	if ev.Raw == nil && ev.Rare == nil {
		keys = plainMapKeys[ev.Kind]
	}
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

// mapKeys are the fields of map events by kind, in order. plainMapKeys are those of events without Raw and Rare: looking into them would
// take most of the time of encoding a small event.
var (
	mapKeys      = newMapKeys()
	plainMapKeys = newMapKeys(keyRemainingCopies, keyExtraKeys, keySlidingWindow, keyLocality, keyOwnership, keySessionID, keyReason, keyMMInfos, keyMMKeys,
		keyTime, keyModelName, keyObjectKey)
)

func newMapKeys(except ...key) (all [KindCleared + 1][]key) {
	for kind := range all {
		for k := range key(numKeys) {
			if kindFields[kind].has(k) && fields[k].mapKey != "" && !slices.Contains(except, k) {
				all[kind] = append(all[kind], k)
			}
		}
	}
	return all
}
