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
func (d *Decoder) readArrayEvent(ev *Event, v value) (int, fault) {
	i := v.at
	if v.n == 0 {
		return i, badTag
	}
	tag, f := readValue(d.p, i)
	if f != 0 {
		return i, f
	}
	if tag.class != classStr {
		return i, badTag
	}
	i = tag.at + tag.n
	kind, dialect := readTag(d.p[tag.at:i])
	var keys []key
	switch kind {
	case KindStored:
		keys = storedKeys[:]
	case KindRemoved:
		keys = removedKeys[:]
	case KindCleared:
	default:
		return i, unknown(d.p[tag.at:i])
	}
	ev.Kind = kind
	d.lists = lists{}
	var seen keySet
	k := 1
	for ; k < v.n && k <= len(keys); k++ {
		i, f = d.readPresent(ev, keys[k-1], i, &seen)
		if f != 0 {
			return i, f
		}
	}
	if kind == KindStored && k < v.n {
		i, f = d.readGroup(ev, i, v.n-k, &seen)
		if f != 0 {
			return i, f
		}
		k = v.n
	}
	for ; k < v.n; k++ {
		i, f = skip(d.p, i, 3)
		if f != 0 {
			return i, f
		}
	}
	return i, d.finish(ev, dialect, seen)
}

// readGroup reads what follows a store's extra_keys: n values. Producers of
// Dynamo's lineage put block_mm_infos there first, which shifts vLLM's three by
// one; where it is nil, only the types of those that follow tell.
func (d *Decoder) readGroup(ev *Event, i, n int, seen *keySet) (int, fault) {
	shift := 0
	undecided := false
	for k := range n {
		if i >= len(d.p) {
			return i, truncated
		}
		switch class := codes[d.p[i]].class; {
		case k == 0 && class == classArray:
			var f fault
			i, f = d.readPresent(ev, keyMMInfos, i, seen)
			if f != 0 {
				return i, f
			}
			shift = 1
			continue
		case k == 0 && class == classNil:
			undecided = true
		case undecided && class != classNil:
			isInt := class == classUint || class == classInt
			if (k == 1 || k == 3) && isInt || k == 2 && class == classStr {
				shift = 1
			}
			undecided = false
		}
		var f fault
		if k-shift < len(groupKeys) {
			i, f = d.readPresent(ev, groupKeys[k-shift], i, seen)
		} else {
			i, f = skip(d.p, i, 3)
		}
		if f != 0 {
			return i, f
		}
	}
	return i, 0
}

// readPresent reads the field at i unless it is nil.
func (d *Decoder) readPresent(ev *Event, k key, i int, seen *keySet) (int, fault) {
	if i >= len(d.p) {
		return i, truncated
	}
	if d.p[i] == 0xc0 {
		return i + 1, 0
	}
	*seen |= 1 << k
	return d.readField(ev, k, i)
}

// readMapEvent reads {"type": tag, ...}. The tag may stand anywhere, and decides
// which of the other keys matter: a field that does not read is held against
// the event only once all are known.
func (d *Decoder) readMapEvent(ev *Event, v value) (int, fault) {
	d.lists = lists{}
	var (
		seen, bad keySet
		why       [numKeys]fault
		m         mapEvent
	)
	i := v.at
	for range v.n {
		name, f := readValue(d.p, i)
		if f != 0 {
			return i, f
		}
		if name.class != classStr {
			if i, f = skip(d.p, i, 3); f == 0 {
				i, f = skip(d.p, i, 3)
			}
			if f != 0 {
				return i, f
			}
			continue
		}
		i = name.at + name.n
		k := keyOf(d.p[name.at:i])
		var next int
		switch k {
		case keyUnknown:
			next, f = skip(d.p, i, 3)
		case keyType, keyEventType, keySeqHashes:
			next, f = m.read(d.p, k, i)
		default:
			next, f = d.readPresent(ev, k, i, &seen)
			if f >= reasonFault {
				bad |= 1 << k
				why[k] = f
				next, f = skip(d.p, i, 3)
			}
		}
		if f != 0 {
			return next, f
		}
		i = next
	}
	return i, d.finishMap(ev, &m, seen, bad, &why)
}

// mapEvent is what a map says of itself: the values of the keys that name what
// it is, and Mooncake's name for block_hashes, which means nothing with others.
type mapEvent struct {
	tag, eventType value
	seqHashes      int
}

func (m *mapEvent) read(p []byte, k key, i int) (int, fault) {
	v, f := readValue(p, i)
	if f != 0 {
		return i, f
	}
	switch {
	case v.class == classNil:
	case k == keyType:
		m.tag = v
	case k == keyEventType:
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
	kept := Event{
		Index:     ev.Index,
		Kind:      ev.Kind,
		Locality:  ev.Locality,
		Ownership: ev.Ownership,
		CacheSalt: ev.CacheSalt,
		SessionID: ev.SessionID,
		ModelName: ev.ModelName,
		Time:      ev.Time,
		HasTime:   ev.HasTime,
	}
	if ev.Kind == KindRemoved {
		kept.BlockHashes = ev.BlockHashes
		kept.Medium = ev.Medium
		kept.GroupIdx, kept.HasGroupIdx = ev.GroupIdx, ev.HasGroupIdx
		kept.SpecKind = ev.SpecKind
		kept.SlidingWindow, kept.HasSlidingWindow = ev.SlidingWindow, ev.HasSlidingWindow
	}
	*ev = kept
}
