package wire

import (
	"encoding/hex"
	"encoding/json"
	"math"
	"strconv"
)

// AppendJSON appends the batch to dst as one JSON object, with the fields of the payload.
// It leaves out the fields that Admit sets, and optional fields that are absent.
//
// Block hashes are decimal strings, and a publisher id is a string of hexadecimal digits. In
// extra_keys, block_mm_infos and mm_keys, bytes and extensions are strings of hexadecimal
// digits, keys of maps are strings, and numbers that JSON lacks are null. The type of an
// mm_key is left out. flags lists anomalies of the batch: tokens_mismatch means that the
// number of a store's tokens does not fit the number of its blocks.
func (b *Batch) AppendJSON(dst []byte) []byte {
	dst = append(dst, `{"ts":`...)
	if b.HasTime {
		dst = appendJSONFloat(dst, b.Time)
	} else {
		dst = append(dst, "null"...)
	}
	dst = append(dst, `,"dp_rank":`...)
	if b.HasRank {
		dst = strconv.AppendUint(dst, uint64(b.Rank), 10)
	} else {
		dst = append(dst, "null"...)
	}
	if b.PublisherID != nil {
		dst = append(dst, `,"publisher_id":"`...)
		dst = hex.AppendEncode(dst, b.PublisherID)
		dst = append(dst, '"')
	}
	form := "array"
	if b.Form == FormMap {
		form = "map"
	}
	dst = append(dst, `,"form":"`+form+`","events":[`...)
	mismatch := false
	for k := range b.Events {
		dst = b.Events[k].appendJSON(appendComma(dst, k))
		mismatch = mismatch || b.Events[k].tokensMismatch()
	}
	dst = append(dst, ']')
	if len(b.Skipped) > 0 {
		dst = append(dst, `,"skipped":[`...)
		for k, s := range b.Skipped {
			dst = append(appendComma(dst, k), `{"index":`...)
			dst = strconv.AppendInt(dst, int64(s.Index), 10)
			dst = append(dst, `,"reason":"`+s.Reason.String()+`"}`...)
		}
		dst = append(dst, ']')
	}
	if mismatch {
		dst = append(dst, `,"flags":["tokens_mismatch"]`...)
	}
	return append(dst, '}')
}

// MarshalJSON returns what AppendJSON appends.
func (b *Batch) MarshalJSON() ([]byte, error) { return b.AppendJSON(nil), nil }

// tokensMismatch reports whether a store has more or fewer tokens than its blocks.
func (ev *Event) tokensMismatch() bool {
	if ev.Kind != KindStored || ev.OpaqueTokens || ev.hashOnly() {
		return false
	}
	want := uint64(len(ev.BlockHashes)) * uint64(ev.BlockSize)
	if ev.Eagle {
		want++
	}
	return uint64(len(ev.Tokens)) != want
}

func (ev *Event) appendJSON(dst []byte) []byte {
	kind := ev.Kind
	if kind != KindStored && kind != KindRemoved {
		kind = KindCleared
	}
	dst = append(dst, `{"kind":"`+kindNames[kind]+`"`...)
	for k := range key(numKeys) {
		f := &fields[k]
		if f.codec != nil && (f.presence == required && kindFields[kind].has(k) || f.codec.isSet(ev)) {
			dst = append(dst, `,"`+f.jsonKey+`":`...)
			dst = ev.appendJSONField(dst, k)
		}
	}
	return append(dst, '}')
}

// appendJSONField encodes the value of a field as MessagePack, and appends that as JSON.
func (ev *Event) appendJSONField(dst []byte, k key) []byte {
	plain := *ev
	if k == keyTokens {
		plain.Eagle, plain.OpaqueTokens = false, false // otherwise encoded as pairs or a placeholder
	}
	p := fields[k].codec.append(nil, &plain)
	j := jsonWriter{
		quoteNumbers: k == keyHashes || k == keyParent,
		dropType:     k == keyMMKeys,
	}
	dst, _ = j.appendValue(dst, p, 0)
	return dst
}

// jsonWriter writes MessagePack as JSON.
type jsonWriter struct {
	// quoteNumbers writes non-negative numbers as strings, for readers that have no 64-bit
	// integers.
	quoteNumbers bool
	// dropType leaves out the key "type" of maps.
	dropType bool
}

// appendValue appends the well-formed value at i, and returns where it ends.
func (j jsonWriter) appendValue(dst, p []byte, i int) ([]byte, int) {
	v, _ := readValue(p, i)
	switch v.class {
	case classBool:
		dst = strconv.AppendBool(dst, v.bits == 1)
	case classUint:
		if j.quoteNumbers {
			return append(strconv.AppendUint(append(dst, '"'), v.bits, 10), '"'), v.end
		}
		dst = strconv.AppendUint(dst, v.bits, 10)
	case classInt:
		dst = strconv.AppendInt(dst, int64(v.bits), 10)
	case classFloat:
		dst = appendJSONFloat(dst, math.Float64frombits(v.bits))
	case classStr:
		dst = appendJSONString(dst, v.bytes)
	case classBin, classExt:
		dst = append(hex.AppendEncode(append(dst, '"'), v.bytes), '"')
	case classArray:
		dst = append(dst, '[')
		at := v.end
		for k := range v.n {
			dst, at = j.appendValue(appendComma(dst, k), p, at)
		}
		return append(dst, ']'), at
	case classMap:
		return j.appendMap(dst, p, v)
	default:
		dst = append(dst, "null"...)
	}
	return dst, v.end
}

func (j jsonWriter) appendMap(dst, p []byte, m value) ([]byte, int) {
	dst = append(dst, '{')
	at := m.end
	n := 0
	for range m.n {
		key, _ := readValue(p, at)
		name := key.bytes
		if key.class == classStr {
			at = key.end
		} else {
			name, at = jsonWriter{}.appendValue(nil, p, at)
		}
		if j.dropType && key.class == classStr && string(name) == "type" {
			at, _ = skip(p, at, 0)
			continue
		}
		dst = append(appendJSONString(appendComma(dst, n), name), ':')
		dst, at = j.appendValue(dst, p, at)
		n++
	}
	return append(dst, '}'), at
}

// appendComma appends the separator before the k-th element.
func appendComma(dst []byte, k int) []byte {
	if k == 0 {
		return dst
	}
	return append(dst, ',')
}

func appendJSONFloat(dst []byte, v float64) []byte {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return append(dst, "null"...)
	}
	return strconv.AppendFloat(dst, v, 'f', -1, 64)
}

func appendJSONString(dst, s []byte) []byte {
	quoted, err := json.Marshal(string(s))
	if err != nil {
		return append(dst, `""`...)
	}
	return append(dst, quoted...)
}
