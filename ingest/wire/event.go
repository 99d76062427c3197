package wire

import "unicode/utf8"

// dialect is whose words an event uses.
type dialect uint8

const (
	// dialectVLLM is that of vLLM, and of all who took it over.
	dialectVLLM dialect = iota
	dialectAIBrix
	dialectMooncake
)

// readTag tells what the event is that has this "type", or stands in an array
// under this tag.
func readTag(tag []byte) (Kind, dialect) {
	switch string(tag) {
	case "BlockStored":
		return KindStored, dialectVLLM
	case "BlockRemoved":
		return KindRemoved, dialectVLLM
	case "AllBlocksCleared":
		return KindCleared, dialectVLLM
	case "BLOCK_STORED":
		return KindStored, dialectAIBrix
	case "BLOCK_REMOVED":
		return KindRemoved, dialectAIBrix
	case "ALL_BLOCKS_CLEARED":
		return KindCleared, dialectAIBrix
	default:
		return 0, 0
	}
}

// readEventType is readTag for Mooncake's "event_type".
func readEventType(tag []byte) (Kind, dialect) {
	switch string(tag) {
	case "stored":
		return KindStored, dialectMooncake
	case "removed":
		return KindRemoved, dialectMooncake
	case "cleared":
		return KindCleared, dialectMooncake
	default:
		return 0, 0
	}
}

// The positions of the fields in array events, from 1, up to where they are the
// same for all producers.
var (
	storedKeys  = [...]key{keyHashes, keyParent, keyTokens, keyBlockSize, keyLoRAID, keyMedium, keyLoRAName, keyExtraKeys}
	groupKeys   = [...]key{keyGroupIdx, keySpecKind, keySlidingWindow}
	removedKeys = [...]key{keyHashes, keyMedium, keyGroupIdx}
)

// readArrayEvent reads [tag, fields...].
func (d *Decoder) readArrayEvent(ev *Event, n, i int) (int, fault) {
	if n == 0 {
		return i, badTag
	}
	tag, i, f := readString(d.p, i, 2)
	if f != 0 {
		return i, f
	}
	if tag == nil {
		return i, badTag
	}
	kind, dialect := readTag(tag)
	var keys []key
	switch kind {
	case KindStored:
		keys = storedKeys[:]
	case KindRemoved:
		keys = removedKeys[:]
	case KindCleared:
	default:
		return i, unknown(tag)
	}
	ev.Kind = kind
	d.lists = lists{}
	read, i, seen, f := d.readFields(ev, keys[:min(n-1, len(keys))], i)
	if f != 0 {
		return i, f
	}
	left := n - 1 - read
	// Whatever nils at the end stand for, they tell nothing.
	at, end := i, i+left
	for at < end && at < len(d.p) && d.p[at] == 0xc0 {
		at++
	}
	if at == end {
		return at, d.finish(ev, dialect, seen)
	}
	if kind == KindStored && read == len(storedKeys) {
		i, seen, f = d.readGroup(ev, i, left, seen)
		if f != 0 {
			return i, f
		}
		left = 0
	}
	// A later version's elements are left unread, of whatever type.
	for range left {
		i, f = skip(d.p, i, 3)
		if f != 0 {
			return i, f
		}
	}
	return i, d.finish(ev, dialect, seen)
}

// readFields reads the values from i on as these fields, and returns how many it
// read. A map in the place of the LoRA name is SGLang's, and the last of its fields:
// what follows it is none of vLLM's.
func (d *Decoder) readFields(ev *Event, keys []key, i int) (n, end int, seen keySet, f fault) {
	p := d.p
	for n, k := range keys {
		if i < len(p) && p[i] == 0xc0 {
			i++
			continue
		}
		seen |= 1 << (k & 31)
		if end := ev.glance(k, p, i); end != 0 {
			i = end
			continue
		}
		at := i
		if i, f = d.readField(ev, k, i); f != 0 {
			return n, i, seen, f
		}
		if k == keyLoRAName && codes[p[at]].class == classMap {
			return n + 1, i, seen, 0
		}
	}
	return len(keys), i, seen, 0
}

// readGroup reads what follows a store's extra_keys: n values. Producers of
// Dynamo's lineage put block_mm_infos there first, which shifts vLLM's three by
// one; where it is nil, only the types of those that follow tell.
func (d *Decoder) readGroup(ev *Event, i, n int, seen keySet) (int, keySet, fault) {
	shift := 0
	undecided := false
	for k := range n {
		if i >= len(d.p) {
			return i, seen, truncated
		}
		switch class := codes[d.p[i]].class; {
		case k == 0 && class == classArray:
			var f fault
			seen |= 1 << keyMMInfos
			i, f = d.readField(ev, keyMMInfos, i)
			if f != 0 {
				return i, seen, f
			}
			shift = 1
			continue
		case k == 0 && class == classNil:
			undecided = true
		case undecided && class != classNil:
			undecided = false
			switch isInt := class == classUint || class == classInt; {
			case k == 1 && isInt, k == 2 && class == classStr:
				shift = 1
			case k == 3 && isInt:
				// A window, or an element that is not known here: that may be larger
				// than any window.
				if v, f := readValue(d.p, i); f == 0 {
					if _, ok := v.int(); ok {
						shift = 1
					}
				}
			}
		}
		var f fault
		switch {
		case d.p[i] == 0xc0:
			i++
		case k-shift < len(groupKeys):
			seen |= 1 << groupKeys[k-shift]
			i, f = d.readField(ev, groupKeys[k-shift], i)
		default:
			i, f = skip(d.p, i, 3)
		}
		if f != 0 {
			return i, seen, f
		}
	}
	return i, seen, 0
}

// readMapEvent reads {"type": tag, ...}. The tag may stand anywhere, and decides
// which of the other keys matter: a field that does not read is held against
// the event only once all are known.
func (d *Decoder) readMapEvent(ev *Event, n, i int) (int, fault) {
	d.lists = lists{}
	var (
		seen, bad keySet
		why       [numKeys]fault
		m         mapEvent
	)
	before := keyUnknown
	for range n {
		var f fault
		k := d.after[before]
		head := &keyHeads[k]
		at := i + head.size
		if !head.begins(d.p, i) || head.rest != "" && (at > len(d.p) || string(d.p[i+16:at]) != head.rest) {
			k, at, f = readKey(d.p, i, 3)
			if f != 0 {
				return i, f
			}
			d.after[before] = k
		}
		before = k
		i = at
		if i < len(d.p) && d.p[i] == 0xc0 {
			i++
			continue
		}
		switch k {
		case keyUnknown:
			i, f = skip(d.p, i, 3)
		case keyType, keyEventType, keySeqHashes:
			i, f = m.read(d.p, k, i)
		default:
			seen |= 1 << (k & 31)
			if end := ev.glance(k, d.p, i); end != 0 {
				i = end
				continue
			}
			i, f = d.readField(ev, k, i)
			if f >= reasonFault {
				bad |= 1 << (k & 31)
				why[k] = f
				i, f = skip(d.p, at, 3)
			}
		}
		if f != 0 {
			return i, f
		}
	}
	return i, d.finishMap(ev, &m, seen, bad, &why)
}

// mapEvent is what a map says of itself: the values of the keys that name what
// it is, and Mooncake's name for block_hashes, which means nothing with others.
type mapEvent struct {
	tag, eventType value
	seqHashes      int
}

// read reads the value at i, which is not nil.
func (m *mapEvent) read(p []byte, k key, i int) (int, fault) {
	if name := glanceString(p, i); k == keyType && name != nil {
		i++
		m.tag = value{class: classStr, at: i, n: len(name)}
		return i + len(name), 0
	}
	v, f := readValue(p, i)
	if f != 0 {
		return i, f
	}
	switch k {
	case keyType:
		m.tag = v
	case keyEventType:
		m.eventType = v
	default:
		m.seqHashes = i
	}
	return skip(p, i, 3)
}

// finishMap decides what the event is, and whether it is whole.
func (d *Decoder) finishMap(ev *Event, m *mapEvent, seen, bad keySet, why *[numKeys]fault) fault {
	tag, read := m.tag, readTag
	if tag.at == 0 {
		tag, read = m.eventType, readEventType
	}
	if tag.class != classStr {
		return badTag
	}
	name := d.p[tag.at : tag.at+tag.n]
	kind, dialect := read(name)
	if kind == 0 {
		return unknown(name)
	}
	// Mooncake may name its events in vLLM's words as well.
	if t := m.eventType; t.class == classStr && dialect == dialectVLLM {
		if same, _ := readEventType(d.p[t.at : t.at+t.n]); same == kind {
			dialect = dialectMooncake
		}
	}
	ev.Kind = kind
	if dialect == dialectMooncake && m.seqHashes != 0 && seen&(1<<keyHashes) == 0 {
		seen |= 1 << keyHashes
		if _, f := d.readField(ev, keyHashes, m.seqHashes); f != 0 {
			return f
		}
	}
	known := kindKeys[kind]
	if bad &= known; bad != 0 {
		return why[bad.first()]
	}
	if seen&^known != 0 {
		ev.keepKind()
	}
	return d.finish(ev, dialect, seen&known)
}

// unknown returns the fault of a tag that no engine is known to use.
func unknown(tag []byte) fault {
	if !utf8.Valid(tag) {
		return badUTF8
	}
	return unknownTag
}

// finish checks that an event has the fields its kind needs, and puts nested
// tokens into a row.
func (d *Decoder) finish(ev *Event, dialect dialect, seen keySet) fault {
	if ev.Rare != nil {
		if len(ev.Rare.RemainingCopies) != len(ev.BlockHashes) {
			ev.Rare.RemainingCopies = nil
		}
		if ev.Rare.empty() {
			ev.Rare = nil // a field twice, the second time empty, or a list of another length
		}
	}
	if ev.Kind == KindCleared {
		return 0
	}
	need := keySet(1 << keyHashes)
	if ev.Kind == KindStored && dialect != dialectMooncake {
		need |= 1<<keyTokens | 1<<keyBlockSize
		if dialect == dialectAIBrix && (d.lists.nested || len(ev.Tokens) == 0 && !ev.OpaqueTokens) {
			need &^= 1 << keyBlockSize
		}
	}
	if need&^seen != 0 {
		return missingField
	}
	if ev.Kind != KindStored || !d.lists.nested {
		return 0
	}
	if dialect == dialectAIBrix {
		return d.lists.blocks(ev)
	}
	return d.lists.pairs(ev)
}

// keepKind clears the fields that an event of this kind does not have.
func (ev *Event) keepKind() {
	if ev.Kind != KindRemoved && ev.Rare != nil {
		ev.Rare.RemainingCopies = nil
	}
	if ev.Kind == KindStored {
		return
	}
	kept := Event{Index: ev.Index, Kind: ev.Kind, CacheSalt: ev.CacheSalt, Rare: ev.Rare}
	if ev.Kind == KindRemoved {
		kept.BlockHashes = ev.BlockHashes
		kept.Medium = ev.Medium
		kept.GroupIdx, kept.HasGroupIdx = ev.GroupIdx, ev.HasGroupIdx
		kept.SpecKind = ev.SpecKind
	} else if ev.Rare != nil {
		ev.Rare.SlidingWindow, ev.Rare.HasSlidingWindow = 0, false
	}
	*ev = kept
}
