package wire

import (
	"encoding/binary"

	"github.com/tinylib/msgp/msgp"
)

// A codec reads and writes the value of a field.
type codec interface {
	// read reads the value at i, which is not nil, and returns where it ends.
	read(d *Decoder, ev *Event, k key, i int) (int, fault)
	isSet(ev *Event) bool
	// append appends the value in MessagePack: nil or an empty value if it is not set.
	append(dst []byte, ev *Event) []byte
}

// readCommon reads the value at i as the field k if k and the value's code are among the
// most common ones, and returns where the value ends; otherwise 0.
func (ev *Event) readCommon(k key, p []byte, i int) int {
	switch {
	case k == keyParent && i+9 <= len(p) && p[i] == uint64Code:
		ev.Parent, ev.HasParent = binary.BigEndian.Uint64(p[i+1:]), true
		return i + 9
	case k == keyBlockSize && i < len(p) && p[i] <= maxFixint:
		ev.BlockSize = uint32(p[i])
		return i + 1
	}
	return 0
}

// readField reads the value at i, which is not nil, as the event's field k. It reads common encodings of common fields without the table.
func (d *Decoder) readField(ev *Event, k key, i int) (int, fault) {
	switch k {
	case keyHashes:
		return hashList{}.read(d, ev, k, i)
	case keyTokens:
		return tokenList{}.read(d, ev, k, i)
	case keyParent:
		if i < len(d.p) && d.p[i] <= maxFixint {
			ev.Parent, ev.HasParent = uint64(d.p[i]), true
			return i + 1, 0
		}
	case keyMedium:
		if s := shortText(d.p, i); s != nil && d.last[k] == string(s) {
			ev.Medium = d.last[k]
			return i + 1 + len(s), 0
		}
	default:
	}
	return fields[k].codec.read(d, ev, k, i)
}

// scalar is a value that is not a list.
type scalar struct {
	// setFunc sets the field, and reports whether the value has a valid type.
	setFunc    func(d *Decoder, ev *Event, v value) bool
	isSetFunc  func(ev *Event) bool
	appendFunc func(dst []byte, ev *Event) []byte
}

func (s scalar) read(d *Decoder, ev *Event, _ key, i int) (int, fault) {
	v, f := readValue(d.p, i)
	if f != 0 {
		return i, f
	}
	if !s.setFunc(d, ev, v) {
		return i, badType
	}
	if v.class >= classArray {
		return skip(d.p, i, fieldDepth)
	}
	return v.end, 0
}

func (s scalar) isSet(ev *Event) bool { return s.isSetFunc(ev) }

func (s scalar) append(dst []byte, ev *Event) []byte { return s.appendFunc(dst, ev) }

// flag is a property of the tokens. It is written in JSON only.
func flag(get func(ev *Event) bool) scalar {
	return scalar{
		isSetFunc:  get,
		appendFunc: func(dst []byte, ev *Event) []byte { return msgp.AppendBool(dst, get(ev)) },
	}
}

// number is an integer.
type number struct {
	field func(ev *Event) (number *int64, isSet *bool)
	// rare reports whether the field is in Event.Rare.
	rare bool
}

func (n number) read(d *Decoder, ev *Event, _ key, i int) (int, fault) {
	v, f := readValue(d.p, i)
	if f != 0 {
		return i, f
	}
	if n.rare {
		d.rareOf(ev)
	}
	number, isSet := n.field(ev)
	if *number, *isSet = v.int(); !*isSet {
		return i, badType
	}
	return v.end, 0
}

func (n number) isSet(ev *Event) bool {
	_, isSet := n.field(ev)
	return *isSet
}

func (n number) append(dst []byte, ev *Event) []byte {
	number, isSet := n.field(ev)
	if !*isSet {
		return msgp.AppendNil(dst)
	}
	return msgp.AppendInt64(dst, *number)
}

// text is a string. It is set if it is not empty.
type text struct {
	get func(ev *Event) *string
	// rare reports whether the field is in Event.Rare.
	rare bool
	// perRequest reports whether the string changes with the request. Such strings have
	// a cache of their own, because they would evict the others.
	perRequest bool
}

func (t text) read(d *Decoder, ev *Event, k key, i int) (int, fault) {
	b, end, f := readText(d.p, i)
	if f != 0 {
		return end, f
	}
	if t.rare {
		d.rareOf(ev)
	}
	s := t.get(ev)
	// The string is usually the same as in the previous event.
	if last := d.last[k]; last == string(b) {
		*s = last
		return end, 0
	}
	cache := &d.names
	if t.perRequest {
		cache = &d.ids
	}
	v, ok := cache.string(b)
	if !ok {
		return end, badUTF8
	}
	if len(v) <= maxLast {
		d.last[k] = v
	}
	*s = v
	return end, 0
}

func (t text) isSet(ev *Event) bool { return *t.get(ev) != "" }

func (t text) append(dst []byte, ev *Event) []byte {
	if !t.isSet(ev) {
		return msgp.AppendNil(dst)
	}
	return msgp.AppendString(dst, *t.get(ev))
}

// note is a text that only events of one kind have.
type note struct {
	text
	kind Kind
}

func (n note) isSet(ev *Event) bool { return ev.Kind == n.kind && n.text.isSet(ev) }

// loraName is a text. SGLang 0.5.18 sends a map of cache salt and session id instead.
type loraName struct{ text }

func (n loraName) read(d *Decoder, ev *Event, k key, i int) (int, fault) {
	if !isMap(d.p, i) {
		return n.text.read(d, ev, k, i)
	}
	_, pairs, i, f := readHeader(d.p, i)
	for ; pairs > 0 && f == 0; pairs-- {
		if k, i, f = readKey(d.p, i, fieldDepth+1); f != 0 {
			break
		}
		if (k == keyCacheSalt || k == keySessionID) && !isNil(d.p, i) {
			i, f = fields[k].codec.read(d, ev, k, i)
		} else {
			i, f = skip(d.p, i, fieldDepth+1)
		}
	}
	return i, f
}

// unused is a field that decides nothing: a value of another type, such as MessagePack's extension for times, or text that
// is not UTF-8, is skipped.
type unused struct{ codec }

func (u unused) read(d *Decoder, ev *Event, k key, i int) (int, fault) {
	end, f := u.codec.read(d, ev, k, i)
	if f >= reasonFault {
		return skip(d.p, i, fieldDepth)
	}
	return end, f
}

// rawList is a list that is kept encoded.
type rawList struct{ get func(r *Raw) *[]byte }

func (l rawList) read(d *Decoder, ev *Event, _ key, i int) (int, fault) {
	if !isArray(d.p, i) {
		return i, badType
	}
	end, f := skip(d.p, i, fieldDepth)
	if f == 0 {
		*l.get(d.rawOf(ev)) = d.p[i:end:end]
	}
	return end, f
}

func (l rawList) isSet(ev *Event) bool { return *l.get(ev.raw()) != nil }

func (l rawList) append(dst []byte, ev *Event) []byte {
	if !l.isSet(ev) {
		return msgp.AppendNil(dst)
	}
	return append(dst, *l.get(ev.raw())...)
}
