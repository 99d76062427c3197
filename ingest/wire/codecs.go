package wire

import (
	"encoding/binary"
	"fmt"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"
)

// A codec reads and writes the value of a field.
type codec interface {
	// read reads the value at i, which is not nil, and returns where it ends.
	read(d *Decoder, ev *Event, k key, i int) (int, fault)
	isSet(ev *Event) bool
	// check returns what makes the value of a valid kind of event impossible to encode,
	// or "".
	check(e *Encoder, ev *Event) string
	// append appends the value in MessagePack; nil, or an empty value, if it is not set.
	append(dst []byte, e *Encoder, ev *Event) []byte
}

// readCommon reads the value at i as the event's field k if it is one of two with a usual
// code, and returns where it ends; else 0.
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

// readField reads the value at i, which is not nil, as the event's field k. The fields
// of nearly all events, in their usual form, do without the table.
func (d *Decoder) readField(ev *Event, k key, i int) (int, fault) {
	switch k {
	case keyHashes:
		return hashList{}.read(d, ev, k, i)
	case keyTokens:
		return tokenList{}.read(d, ev, k, i)
	case keyParent: // readCommon has the usual code
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
	// set sets the field, and reports whether the value has the right type.
	set       func(d *Decoder, ev *Event, v value) bool
	get       func(dst []byte, e *Encoder, ev *Event) []byte
	isSetFunc func(ev *Event) bool
	// checkFunc is nil where every value can be encoded.
	checkFunc func(e *Encoder, ev *Event) string
}

func (s scalar) read(d *Decoder, ev *Event, _ key, i int) (int, fault) {
	v, f := readValue(d.p, i)
	if f != 0 {
		return i, f
	}
	if !s.set(d, ev, v) {
		return i, badType
	}
	if v.class >= classArray {
		return skip(d.p, i, fieldDepth)
	}
	return v.end, 0
}

func (s scalar) isSet(ev *Event) bool { return s.isSetFunc(ev) }

func (s scalar) check(e *Encoder, ev *Event) string {
	if s.checkFunc == nil {
		return ""
	}
	return s.checkFunc(e, ev)
}

func (s scalar) append(dst []byte, e *Encoder, ev *Event) []byte { return s.get(dst, e, ev) }

// number is an integer. rare reports whether the field is in Event.Rare.
type number struct {
	field func(ev *Event) (number *int64, isSet *bool)
	rare  bool
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

func (number) check(*Encoder, *Event) string { return "" }

func (n number) append(dst []byte, _ *Encoder, ev *Event) []byte {
	number, isSet := n.field(ev)
	if !*isSet {
		return msgp.AppendNil(dst)
	}
	return msgp.AppendInt64(dst, *number)
}

// flag is a property of the tokens, which is not encoded.
func flag(get func(ev *Event) bool) scalar {
	return scalar{
		get:       func(dst []byte, _ *Encoder, ev *Event) []byte { return msgp.AppendBool(dst, get(ev)) },
		isSetFunc: get,
		checkFunc: func(e *Encoder, ev *Event) string {
			switch {
			case get(ev) && e.Producer == ProducerAIBrix:
				return "is set, but AIBrix has no such field"
			case ev.Eagle && ev.OpaqueTokens:
				return "is set, but opaque tokens are not in pairs"
			default:
				return ""
			}
		},
	}
}

// text is a string. It is set if it is not empty.
type text struct {
	get func(ev *Event) *string
	// rare reports whether the field is in Event.Rare.
	rare bool
	// perRequest reports whether the string changes with the request. Such strings are
	// cached apart, since they would evict the others.
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
	// Usually the string is that of the previous event.
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

func (t text) check(_ *Encoder, ev *Event) string {
	s := *t.get(ev)
	if !utf8.ValidString(s) {
		return "is not UTF-8"
	}
	return checkLen(len(s))
}

func (t text) append(dst []byte, _ *Encoder, ev *Event) []byte {
	if !t.isSet(ev) {
		return msgp.AppendNil(dst)
	}
	return msgp.AppendString(dst, *t.get(ev))
}

// loraName is a text, or SGLang's map in its place.
type loraName struct{ text }

func (n loraName) read(d *Decoder, ev *Event, k key, i int) (int, fault) {
	if hasType(d.p, i, msgp.MapType) {
		return metadata{}.read(d, ev, k, i)
	}
	return n.text.read(d, ev, k, i)
}

// metadata is the map that SGLang 0.5.18 puts in the place of the LoRA name, of two
// other fields.
type metadata struct{}

var metadataKeys = [...]key{keyCacheSalt, keySessionID}

func (metadata) read(d *Decoder, ev *Event, _ key, i int) (int, fault) {
	_, n, i, f := readHeader(d.p, i)
	for ; n > 0 && f == 0; n-- {
		var k key
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

func (metadata) isSet(*Event) bool             { return false }
func (metadata) check(*Encoder, *Event) string { return "" }

func (metadata) append(dst []byte, e *Encoder, ev *Event) []byte {
	var keys []key
	for _, k := range metadataKeys {
		if fields[k].codec.isSet(ev) {
			keys = append(keys, k)
		}
	}
	return e.appendMembers(msgp.AppendMapHeader(dst, uint32(len(keys))), keys, ev)
}

// rawList is a list that is kept encoded.
type rawList struct{ get func(r *Raw) *[]byte }

func (l rawList) read(d *Decoder, ev *Event, _ key, i int) (int, fault) {
	if !hasType(d.p, i, msgp.ArrayType) {
		return i, badType
	}
	end, f := skip(d.p, i, fieldDepth)
	if f == 0 {
		*l.get(d.rawOf(ev)) = d.p[i:end:end]
	}
	return end, f
}

func (l rawList) isSet(ev *Event) bool { return *l.get(ev.raw()) != nil }

func (l rawList) check(_ *Encoder, ev *Event) string {
	p := *l.get(ev.raw())
	end, f := skip(p, 0, fieldDepth)
	if p != nil && (f != 0 || end != len(p) || !hasType(p, 0, msgp.ArrayType)) {
		return fmt.Sprintf("is not one MessagePack list, of at most %d nested arrays and maps", maxDepth-fieldDepth)
	}
	return ""
}

func (l rawList) append(dst []byte, _ *Encoder, ev *Event) []byte {
	if !l.isSet(ev) {
		return msgp.AppendNil(dst)
	}
	return append(dst, *l.get(ev.raw())...)
}
