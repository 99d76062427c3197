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
// Block hashes are decimal strings, and a publisher id is a string of hexadecimal digits. In extra_keys, block_mm_infos and mm_keys, bytes
// and extensions are strings of hexadecimal digits, keys of maps are strings, and numbers that JSON lacks are null. The type of an mm_key
// is left out. flags lists anomalies of the batch: tokens_mismatch means that the number of a store's tokens does not fit the number of its
// blocks.
func (b *Batch) AppendJSON(dst []byte) []byte {
	type skip struct {
		Index  int    `json:"index"`
		Reason string `json:"reason"`
	}
	var out struct {
		Time        any               `json:"ts"`
		Rank        any               `json:"dp_rank"`
		PublisherID string            `json:"publisher_id,omitempty"`
		Form        string            `json:"form"`
		Events      []json.RawMessage `json:"events"`
		Skipped     []skip            `json:"skipped,omitempty"`
		Flags       []string          `json:"flags,omitempty"`
	}
	if b.HasTime {
		out.Time = jsonFloat(b.Time)
	}
	if b.HasRank {
		out.Rank = b.Rank
	}
	out.PublisherID = hex.EncodeToString(b.PublisherID)
	out.Form = "array"
	if b.Form == FormMap {
		out.Form = "map"
	}
	out.Events = make([]json.RawMessage, len(b.Events))
	for k := range b.Events {
		out.Events[k] = b.Events[k].json()
		if b.Events[k].tokensMismatch() {
			out.Flags = []string{"tokens_mismatch"}
		}
	}
	for _, s := range b.Skipped {
		out.Skipped = append(out.Skipped, skip{s.Index, s.Reason.String()})
	}
	return appendJSON(dst, out)
}

// appendJSON appends a value that has an encoding.
func appendJSON(dst []byte, v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return append(dst, text...)
}

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

// json returns the event as an object, with its fields in the order of keys.
func (ev *Event) json() []byte {
	kind := ev.Kind
	if kind != KindStored && kind != KindRemoved {
		kind = KindCleared
	}
	dst := []byte(`{"kind":"` + kindNames[kind] + `"`)
	for k := range key(numKeys) {
		f := &fields[k]
		if f.codec != nil && (f.presence == required && kindFields[kind].has(k) || f.codec.isSet(ev)) {
			dst = append(dst, `,"`+f.jsonKey+`":`...)
			dst = appendJSON(dst, ev.jsonField(k))
		}
	}
	return append(dst, '}')
}

// jsonField returns the value of a field. It encodes the field as MessagePack, and converts that.
func (ev *Event) jsonField(k key) any {
	plain := *ev
	if k == keyTokens {
		plain.Eagle, plain.OpaqueTokens = false, false // otherwise encoded as pairs or a placeholder
	}
	j := jsonReader{
		quoteNumbers: k == keyHashes || k == keyParent,
		dropType:     k == keyMMKeys,
	}
	v, _ := j.read(fields[k].codec.append(nil, &plain), 0)
	return v
}

// jsonReader converts MessagePack to values of package encoding/json.
type jsonReader struct {
	// quoteNumbers converts non-negative numbers to strings, for readers that have no 64-bit integers.
	quoteNumbers bool
	// dropType leaves out the key "type" of maps.
	dropType bool
}

// read converts the well-formed value at i, and returns where it ends.
func (j jsonReader) read(p []byte, i int) (_ any, end int) {
	v, _ := readValue(p, i)
	switch v.class {
	case classBool:
		return v.bits == 1, v.end
	case classUint:
		if j.quoteNumbers {
			return strconv.FormatUint(v.bits, 10), v.end
		}
		return v.bits, v.end
	case classInt:
		return int64(v.bits), v.end
	case classFloat:
		return jsonFloat(math.Float64frombits(v.bits)), v.end
	case classStr:
		return string(v.bytes), v.end
	case classBin, classExt:
		return hex.EncodeToString(v.bytes), v.end
	case classArray:
		list, end := make([]any, v.n), v.end
		for k := range list {
			list[k], end = j.read(p, end)
		}
		return list, end
	case classMap:
		return j.readMap(p, v)
	default:
		return nil, v.end
	}
}

func (j jsonReader) readMap(p []byte, m value) (_ map[string]any, end int) {
	all := make(map[string]any)
	end = m.end
	for range m.n {
		var key, v any
		key, end = jsonReader{}.read(p, end)
		name, ok := key.(string)
		if !ok {
			name = string(appendJSON(nil, key))
		}
		if v, end = j.read(p, end); name != "type" || !j.dropType {
			all[name] = v
		}
	}
	return all, end
}

// jsonFloat returns a number, or nil if JSON lacks it.
func jsonFloat(v float64) any {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	return v
}
