package wire

import (
	"encoding/binary"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"
)

// readArrayEvent reads [tag, fields...].
func (d *Decoder) readArrayEvent(ev *Event, n, i int) (int, fault) {
	if n == 0 {
		return i, badTag
	}
	tag, i, f := readText(d.p, i)
	if f == badType {
		f = badTag
	}
	if f != 0 {
		return i, f
	}
	n--
	kind, producer := kindOfTag(tag)
	if kind == 0 {
		return i, d.unknownTagFault(tag)
	}
	ev.Kind = kind
	d.nesting = nesting{}
	var seen keySet
	keys := arrayFields[kind]
	if kind == KindStored && n < len(keys) {
		ev.Inputs = InputsWithoutField
	}
	if kind == KindCleared && (n == 0 || !isMedium(d.p, i)) {
		keys = nil // vLLM has another field there
	}
	read, i, f := d.readFields(ev, keys[:min(n, len(keys))], i, &seen)
	if f != 0 {
		return i, f
	}
	n -= read
	nils := 0
	for nils < n && isNil(d.p, i+nils) {
		nils++
	}
	if nils == n { // nothing else is set
		return i + n, d.finishEvent(ev, producer, seen)
	}
	if kind == KindStored && read == len(keys) {
		keys = groupFieldsAt(d.p, i, nils)
		if read, i, f = d.readFields(ev, keys[:min(n, len(keys))], i, &seen); f != 0 {
			return i, f
		}
		n -= read
	}
	// Elements of a later version are skipped, whatever their type.
	for range n {
		if i, f = skip(d.p, i, fieldDepth); f != 0 {
			return i, f
		}
	}
	return i, d.finishEvent(ev, producer, seen)
}

// isMedium reports whether the value at i is the name of a medium.
func isMedium(p []byte, i int) bool {
	name, _, f := readText(p, i)
	_, known := tierOf(string(name))
	return f == 0 && len(name) > 0 && known
}

// readFields reads the values from i on as the fields keys, and returns how many it read. It stops after a map in the place of the LoRA
// name: SGLang has other fields after the map than vLLM.
func (d *Decoder) readFields(ev *Event, keys []key, i int, seen *keySet) (n, end int, f fault) {
	p := d.p
	for n, k := range keys {
		if isNil(p, i) {
			i++
			continue
		}
		seen.add(k)
		if end := ev.readCommon(k, p, i); end != 0 {
			i = end
			continue
		}
		at := i
		if i, f = d.readField(ev, k, i); f != 0 {
			return n, i, f
		}
		if k == keyLoRAName && isMap(p, at) {
			ev.Inputs = InputsNone // the map has the salt
			return n + 1, i, 0
		}
	}
	return len(keys), i, 0
}

// readMapEvent reads {"type": tag, ...} and returns where it ends. It reads the fields in known, and skips the others. The tag may be
// anywhere, and decides which fields the event has: a bad field is reported only after the tag is known.
func (d *Decoder) readMapEvent(ev *Event, n, i int, known keySet) (int, fault) {
	var (
		seen keySet
		m    mapEvent
	)
	d.nesting = nesting{}
	p := d.p
	start := i
	previous := keyUnknown
	for range n {
		var f fault
		// The key is usually the same that followed the previous key last time.
		k := d.after[previous]
		head := &keyHeads[k]
		at := i + head.size
		if !head.begins(p, i) || head.rest != "" && (at > len(p) || string(p[i+16:at]) != head.rest) {
			if k, at, f = readKey(p, i, fieldDepth); f != 0 {
				return i, f
			}
			d.after[previous] = k
		}
		previous = k
		i = at
		if isNil(p, i) {
			i++
			continue
		}
		if !known.has(k) {
			if i, f = m.read(k, p, i); f != 0 {
				return i, f
			}
			continue
		}
		seen.add(k)
		if end := ev.readCommon(k, p, i); end != 0 {
			i = end
			continue
		}
		if i, f = d.readField(ev, k, i); f >= reasonFault {
			m.addFault(k, f)
			i, f = skip(p, at, fieldDepth)
		}
		if f != 0 {
			return i, f
		}
	}
	kind, producer, f := m.kind(d)
	if f != 0 {
		return i, f
	}
	if seen&^kindFields[kind] != 0 {
		// Read the event again, without the fields of other kinds of events.
		*ev = Event{Index: ev.Index}
		return d.readMapEvent(ev, n, start, kindFields[kind])
	}
	ev.Kind = kind
	if producer == producerMooncake && m.seqHashes != 0 && kind != KindCleared && !seen.has(keyHashes) {
		seen.add(keyHashes)
		if _, f := d.readField(ev, keyHashes, m.seqHashes); f != 0 {
			return i, f
		}
	}
	if m.fault != 0 {
		return i, m.fault
	}
	return i, d.finishEvent(ev, producer, seen)
}

// mapEvent is the state of reading a map event.
type mapEvent struct {
	// tag and eventType are the values of the keys "type" and "event_type". Each is nil
	// if it is absent or not a string. hasTag reports whether the key "type" is present.
	tag, eventType []byte
	hasTag         bool
	// seqHashes is where the value of Mooncake's "seq_hashes" begins; 0 if it is absent.
	seqHashes int
	// badKey is the first bad field in the order of keys, and fault its fault.
	badKey key
	fault  fault
}

// read reads the value at i of a key that belongs to no field, and returns where the value ends.
func (m *mapEvent) read(k key, p []byte, i int) (end int, f fault) {
	switch k {
	case keyType:
		m.hasTag = true
		m.tag, end, f = readName(p, i, fieldDepth)
		return end, f
	case keyEventType:
		m.eventType, end, f = readName(p, i, fieldDepth)
		return end, f
	case keySeqHashes:
		m.seqHashes = i
	default:
	}
	return skip(p, i, fieldDepth)
}

func (m *mapEvent) addFault(k key, f fault) {
	if m.badKey == keyUnknown || k <= m.badKey {
		m.badKey, m.fault = k, f
	}
}

// kind returns the kind and producer that the event's tag names.
func (m *mapEvent) kind(d *Decoder) (kind Kind, producer producer, f fault) {
	name := m.tag
	if m.hasTag {
		kind, producer = kindOfTag(name)
	} else {
		name = m.eventType
		kind, producer = mooncakeTags.kindOf(name), producerMooncake
	}
	switch {
	case name == nil:
		return 0, 0, badTag
	case kind == 0:
		return 0, 0, d.unknownTagFault(name)
	case producer == producerVLLM && m.eventType != nil && mooncakeTags.kindOf(m.eventType) == kind:
		producer = producerMooncake // Mooncake may send vLLM's tag beside its own.
	}
	return kind, producer, 0
}

// keyHead is the encoding of a key in a map event, header included. words are its first 16 bytes, and masks select the bytes that belong to
// the key. Comparing words is faster than calling a function that compares strings.
type keyHead struct {
	words, masks [2]uint64
	rest         string // the bytes after the first 16
	size         int    // of the whole encoding
	_            uint64 // makes the size a power of two, for faster indexing
}

// keyHeads are indexed by key. The head of keyUnknown is 0xc1, which MessagePack never uses.
var keyHeads [numKeys]keyHead

func init() {
	keyHeads[keyUnknown] = keyHead{words: [2]uint64{0xc1}, masks: [2]uint64{0xff}}
	for k, f := range fields {
		if f.mapKey == "" {
			continue
		}
		var head, mask [16]byte
		encoded := msgp.AppendString(nil, f.mapKey)
		for j := range copy(head[:], encoded) {
			mask[j] = 0xff
		}
		h := &keyHeads[k]
		for j := range 2 {
			h.words[j] = binary.LittleEndian.Uint64(head[8*j:])
			h.masks[j] = binary.LittleEndian.Uint64(mask[8*j:])
		}
		h.size = len(encoded)
		h.rest = string(encoded[min(len(encoded), 16):])
	}
}

// begins reports whether the key's first 16 bytes are at i. It returns false in the last 15 bytes of the payload.
func (h *keyHead) begins(p []byte, i int) bool {
	if i+16 > len(p) {
		return false
	}
	b := p[i : i+16 : i+16]
	return (binary.LittleEndian.Uint64(b)^h.words[0])&h.masks[0]|
		(binary.LittleEndian.Uint64(b[8:])^h.words[1])&h.masks[1] == 0
}

// readKey reads the key at i, and returns where it ends. depth is the number of arrays and
// maps around the key. The result is keyUnknown if the key is unknown or not a string.
func readKey(p []byte, i, depth int) (key, int, fault) {
	name, i, f := readName(p, i, depth)
	return keysByName[string(name)], i, f
}

func (d *Decoder) unknownTagFault(tag []byte) fault {
	if !utf8.Valid(tag) {
		return badUTF8
	}
	if d.batch.UnknownTag == "" {
		d.batch.UnknownTag = string(tag[:min(len(tag), maxTagBytes)])
	}
	return unknownTag
}

// finishEvent checks that an event has the fields that its kind requires, and flattens nested tokens.
func (d *Decoder) finishEvent(ev *Event, producer producer, seen keySet) fault {
	if ev.Rare != nil {
		if len(ev.Rare.RemainingCopies) != len(ev.BlockHashes) {
			ev.Rare.RemainingCopies = nil
		}
		if ev.Rare.empty() {
			ev.Rare = nil
		}
	}
	if ev.Kind == KindCleared {
		return 0
	}
	if !seen.has(keyHashes) {
		return missingField
	}
	if ev.Kind == KindRemoved {
		return 0
	}
	nested := d.nesting.nested
	if producer != producerMooncake {
		impliedSize := producer == producerAIBrix && (nested || len(ev.Tokens) == 0 && !ev.OpaqueTokens)
		if !seen.has(keyTokens) || !seen.has(keyBlockSize) && !impliedSize {
			return missingField
		}
	}
	switch {
	case !nested:
		return 0
	case producer == producerAIBrix:
		return d.nesting.flattenBlocks(ev)
	default:
		return d.nesting.flattenPairs(ev)
	}
}
