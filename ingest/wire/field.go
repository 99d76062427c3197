package wire

import (
	"encoding/binary"
	"math"
)

// glance reads the field k at i if it is one of two, in the form that nearly all
// have, and returns where it ends; else 0.
func (ev *Event) glance(k key, p []byte, i int) int {
	switch {
	case k == keyParent && i+9 <= len(p) && p[i] == 0xcf:
		ev.Parent, ev.HasParent = binary.BigEndian.Uint64(p[i+1:]), true
		return i + 9
	case k == keyBlockSize && i < len(p) && p[i] <= 0x7f:
		ev.BlockSize = uint32(p[i])
		return i + 1
	}
	return 0
}

// readField reads the value at i, which is not nil, as the event's field k, and
// returns where it ends.
func (d *Decoder) readField(ev *Event, k key, i int) (int, fault) {
	switch k {
	case keyHashes:
		return d.readHashes(ev, i)
	case keyTokens:
		return d.readTokens(ev, i)
	case keyMedium:
		// Mostly that of the event before.
		last := d.last[k]
		if name := glanceString(d.p, i); name != nil && last == string(name) {
			ev.Medium = last
			return i + 1 + len(last), 0
		}
	case keyExtraKeys:
		return d.readRaw(&d.rawOf(ev).ExtraKeys, i)
	case keyMMInfos:
		return d.readRaw(&d.rawOf(ev).BlockMMInfos, i)
	case keyMMKeys:
		return d.readRaw(&d.rawOf(ev).MMKeys, i)
	case keyRemainingCopies:
		return d.readRemainingCopies(ev, i)
	default:
	}
	return d.readScalar(ev, k, i)
}

// readScalar is readField for those that are no list.
func (d *Decoder) readScalar(ev *Event, k key, i int) (int, fault) {
	v, f := readValue(d.p, i)
	if f != 0 {
		return i, f
	}
	switch k {
	case keyParent:
		ev.Parent, ev.HasParent = v.hash(d.p)
		if !ev.HasParent {
			return i, badType
		}
		return v.at + v.n, 0
	case keyBlockSize:
		if v.class != classUint || v.bits > math.MaxUint32 {
			return i, badType
		}
		ev.BlockSize = uint32(v.bits)
		return v.at, 0
	case keyLoRAID:
		ev.LoRAID, ev.HasLoRAID = v.int()
		return v.at, typed(ev.HasLoRAID)
	case keyOrigin:
		ev.Origin = OriginUnknown
		if v.class != classStr {
			return skip(d.p, i, 3)
		}
		ev.Origin = originOf(d.p[v.at : v.at+v.n])
		return v.at + v.n, 0
	case keyGroupIdx:
		ev.GroupIdx, ev.HasGroupIdx = v.int()
		return v.at, typed(ev.HasGroupIdx)
	case keySlidingWindow:
		n, ok := v.int()
		if ok {
			rare := d.rareOf(ev)
			rare.SlidingWindow, rare.HasSlidingWindow = n, true
		}
		return v.at, typed(ok)
	case keyTime:
		t, ok := v.float()
		if ok {
			t, ok = seconds(t)
		}
		if ok {
			rare := d.rareOf(ev)
			rare.Time, rare.HasTime = t, true
		}
		return v.at, typed(ok)
	case keyLoRAName:
		if v.class == classMap {
			return d.readMetadata(ev, v)
		}
		return d.readName(&ev.LoRAName, k, v)
	case keyMedium:
		return d.readName(&ev.Medium, k, v)
	case keySpecKind:
		return d.readName(&ev.SpecKind, k, v)
	case keyLocality, keyOwnership, keyModelName, keySessionID:
		return d.readRare(ev, k, v)
	default:
		return d.readID(&ev.CacheSalt, v)
	}
}

func typed(ok bool) fault {
	if ok {
		return 0
	}
	return badType
}

// readRaw keeps a list as it stands.
func (d *Decoder) readRaw(raw *[]byte, i int) (int, fault) {
	end, f := skip(d.p, i, 3)
	if f != 0 {
		return i, f
	}
	if codes[d.p[i]].class != classArray {
		return i, badType
	}
	*raw = d.p[i:end:end]
	return end, 0
}

// readName reads one of a few strings that come over and over.
func (d *Decoder) readName(s *string, k key, v value) (int, fault) {
	if v.class != classStr {
		return v.at, badType
	}
	end := v.at + v.n
	b := d.p[v.at:end]
	if d.last[k] == string(b) {
		*s = d.last[k]
		return end, 0
	}
	name, ok := d.names.string(b)
	if !ok {
		return end, badUTF8
	}
	if len(name) <= maxLast {
		d.last[k] = name
	}
	*s = name
	return end, 0
}

// readRare reads one of the strings that few events have, and fewer have empty.
func (d *Decoder) readRare(ev *Event, k key, v value) (int, fault) {
	if v.class == classStr && v.n == 0 && ev.Rare == nil {
		return v.at, 0
	}
	if v.class != classStr {
		return v.at, badType
	}
	rare := d.rareOf(ev)
	switch k {
	case keyLocality:
		return d.readName(&rare.Locality, k, v)
	case keyOwnership:
		return d.readName(&rare.Ownership, k, v)
	case keyModelName:
		return d.readName(&rare.ModelName, k, v)
	default:
		return d.readID(&rare.SessionID, v)
	}
}

// rawOf returns the event's raw fields, to be written.
func (d *Decoder) rawOf(ev *Event) *Raw {
	if ev.Raw == nil {
		ev.Raw, d.apart = d.raws.one(), true
	}
	return ev.Raw
}

// rareOf returns the event's rare fields, to be written.
func (d *Decoder) rareOf(ev *Event) *Rare {
	if ev.Rare == nil {
		ev.Rare, d.apart = d.rares.one(), true
	}
	return ev.Rare
}

// readID reads a string that may be another with each request.
func (d *Decoder) readID(s *string, v value) (int, fault) {
	if v.class != classStr {
		return v.at, badType
	}
	end := v.at + v.n
	id, ok := d.ids.string(d.p[v.at:end])
	if !ok {
		return end, badUTF8
	}
	*s = id
	return end, 0
}

// readMetadata reads the map that SGLang 0.5.18 puts in the place of lora_name.
func (d *Decoder) readMetadata(ev *Event, v value) (int, fault) {
	i := v.at
	for range v.n {
		k, at, f := readKey(d.p, i, 4)
		if f != 0 {
			return i, f
		}
		i = at
		if i < len(d.p) && d.p[i] != 0xc0 && (k == keyCacheSalt || k == keySessionID) {
			i, f = d.readField(ev, k, i)
		} else {
			i, f = skip(d.p, i, 4)
		}
		if f != 0 {
			return i, f
		}
	}
	return i, 0
}

// hash returns a block hash: an integer by two's complement, bytes by their last
// eight.
func (v value) hash(p []byte) (uint64, bool) {
	switch v.class {
	case classUint, classInt:
		return v.bits, true
	case classBin:
		b := p[v.at : v.at+v.n]
		if len(b) >= 8 {
			return binary.BigEndian.Uint64(b[len(b)-8:]), true
		}
		var h uint64
		for _, c := range b {
			h = h<<8 | uint64(c)
		}
		return h, len(b) > 0
	default:
		return 0, false
	}
}

func (d *Decoder) readHashes(ev *Event, i int) (int, fault) {
	p := d.p
	class, n, i, f := readNest(p, i)
	if f != 0 {
		return i, f
	}
	if class != classArray {
		return i, badType
	}
	hashes := d.hashes.room(n)
	if len(hashes) != n {
		// Room only for hashes that are there.
		if f := checkHashes(p, n, i); f != 0 {
			return i, f
		}
		hashes = d.hashes.grow(n)
	}
	for k := range hashes {
		// Nearly all hashes are large, and positive.
		h, ok := glance64(p, i, 0xcf)
		if ok {
			hashes[k] = h
			i += 9
			continue
		}
		v, f := readValue(p, i)
		if f != 0 {
			return i, f
		}
		if hashes[k], ok = v.hash(p); !ok {
			return i, badType
		}
		i = v.at + v.n
	}
	ev.BlockHashes = d.hashes.take(n)
	return i, 0
}

// checkHashes tells what is wrong with the n hashes from i on.
func checkHashes(p []byte, n, i int) fault {
	for range n {
		v, f := readValue(p, i)
		if f != 0 {
			return f
		}
		if _, ok := v.hash(p); !ok {
			return badType
		}
		i = v.at + v.n
	}
	return 0
}

// readRemainingCopies reads a number for each hash. What is no such list is skipped:
// the counts are a hint, and the remove stands without them.
func (d *Decoder) readRemainingCopies(ev *Event, i int) (int, fault) {
	if ev.Rare != nil {
		ev.Rare.RemainingCopies = nil
	}
	p := d.p
	class, n, at, f := readNest(p, i)
	if f != 0 {
		return i, f
	}
	if class != classArray || n == 0 {
		return skip(p, i, 3)
	}
	counts := d.tokens.room(n)
	if len(counts) != n {
		// Room only for counts that are there.
		if !areCounts(p, n, at) {
			return skip(p, i, 3)
		}
		counts = d.tokens.grow(n)
	}
	for k := range counts {
		v, f := readValue(p, at)
		if f != 0 {
			return at, f
		}
		if !v.isCount() {
			return skip(p, i, 3)
		}
		counts[k] = uint32(v.bits)
		at = v.at
	}
	d.rareOf(ev).RemainingCopies = d.tokens.take(n)
	return at, 0
}

func (v value) isCount() bool { return v.class == classUint && v.bits <= math.MaxUint32 }

// areCounts reports whether n counts stand from i on.
func areCounts(p []byte, n, i int) bool {
	for range n {
		v, f := readValue(p, i)
		if f != 0 || !v.isCount() {
			return false
		}
		i = v.at
	}
	return true
}
