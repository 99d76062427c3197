package wire

import (
	"encoding/hex"
	"encoding/json"
	"math"
	"strconv"
)

// AppendJSON appends the batch to dst as one JSON object, as it stood in the
// payload: what Admit adds is left out, as are optional fields that are absent.
// Block hashes are decimal strings, a publisher id hexadecimal digits. In extra_keys, block_mm_infos and mm_keys
// bytes and extensions are strings of hexadecimal digits, keys of maps are
// strings, a number JSON has not is null, and the type that tags an mm_key is
// left out. flags tells what is odd about the batch:
// tokens_mismatch, that a store's tokens are not those of its blocks.
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
	dst = append(dst, `,"form":"`...)
	if b.Form == FormMap {
		dst = append(dst, `map","events":[`...)
	} else {
		dst = append(dst, `array","events":[`...)
	}
	mismatch := false
	for k := range b.Events {
		if k > 0 {
			dst = append(dst, ',')
		}
		dst = b.Events[k].appendJSON(dst)
		mismatch = mismatch || b.Events[k].tokensMismatch()
	}
	dst = append(dst, ']')
	if len(b.Skipped) > 0 {
		dst = append(dst, `,"skipped":[`...)
		for k, s := range b.Skipped {
			if k > 0 {
				dst = append(dst, ',')
			}
			dst = append(dst, `{"index":`...)
			dst = strconv.AppendInt(dst, int64(s.Index), 10)
			dst = append(dst, `,"reason":"`...)
			dst = append(dst, s.Reason.String()...)
			dst = append(dst, `"}`...)
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

// tokensMismatch tells whether a store has other tokens than its blocks hold.
func (ev *Event) tokensMismatch() bool {
	if ev.Kind != KindStored || ev.OpaqueTokens || ev.BlockSize == 0 && len(ev.Tokens) == 0 {
		return false
	}
	want := uint64(len(ev.BlockHashes)) * uint64(ev.BlockSize)
	if ev.Eagle {
		want++
	}
	return uint64(len(ev.Tokens)) != want
}

func (ev *Event) appendJSON(dst []byte) []byte {
	o := jsonObject{dst: dst}
	switch ev.Kind {
	case KindStored:
		o.string("kind", "stored")
		o.hashes("block_hashes", ev.BlockHashes)
		o.parent(ev)
		o.numbers("token_ids", ev.Tokens)
		o.flag("is_eagle", ev.Eagle)
		o.flag("opaque_tokens", ev.OpaqueTokens)
		o.int("block_size", int64(ev.BlockSize), true)
		o.int("lora_id", ev.LoRAID, ev.HasLoRAID)
		if ev.Origin != OriginUnknown {
			o.string("origin", ev.Origin.String())
		}
	case KindRemoved:
		o.string("kind", "removed")
		o.hashes("block_hashes", ev.BlockHashes)
		if copies := ev.rare().RemainingCopies; copies != nil {
			o.numbers("remaining_copy_counts", copies)
		}
	default:
		o.string("kind", "cleared")
	}
	o.string("medium", ev.Medium)
	o.string("lora_name", ev.LoRAName)
	o.raw("extra_keys", ev.raw().ExtraKeys, false)
	o.int("group_idx", ev.GroupIdx, ev.HasGroupIdx)
	o.string("spec_kind", ev.SpecKind)
	o.int("sliding_window", ev.rare().SlidingWindow, ev.rare().HasSlidingWindow)
	o.string("locality", ev.rare().Locality)
	o.string("ownership", ev.rare().Ownership)
	o.string("cache_salt", ev.CacheSalt)
	o.string("session_id", ev.rare().SessionID)
	o.raw("block_mm_infos", ev.raw().BlockMMInfos, false)
	o.raw("mm_keys", ev.raw().MMKeys, true)
	if ev.rare().HasTime {
		o.key("ts")
		o.dst = appendJSONFloat(o.dst, ev.rare().Time)
	}
	o.string("model_name", ev.rare().ModelName)
	return append(o.dst, '}')
}

// jsonObject writes an object's members, the absent ones left out.
type jsonObject struct {
	dst []byte
	n   int
}

func (o *jsonObject) key(name string) {
	sep := byte('{')
	if o.n > 0 {
		sep = ','
	}
	o.n++
	o.dst = append(o.dst, sep, '"')
	o.dst = append(o.dst, name...)
	o.dst = append(o.dst, `":`...)
}

func (o *jsonObject) string(name, v string) {
	if v != "" {
		o.key(name)
		o.dst = appendJSONString(o.dst, v)
	}
}

func (o *jsonObject) int(name string, v int64, has bool) {
	if has {
		o.key(name)
		o.dst = strconv.AppendInt(o.dst, v, 10)
	}
}

func (o *jsonObject) flag(name string, v bool) {
	if v {
		o.key(name)
		o.dst = append(o.dst, "true"...)
	}
}

func (o *jsonObject) hashes(name string, hashes []uint64) {
	o.key(name)
	o.dst = append(o.dst, '[')
	for k, h := range hashes {
		if k > 0 {
			o.dst = append(o.dst, ',')
		}
		o.dst = appendJSONHash(o.dst, h)
	}
	o.dst = append(o.dst, ']')
}

func (o *jsonObject) parent(ev *Event) {
	o.key("parent")
	if ev.HasParent {
		o.dst = appendJSONHash(o.dst, ev.Parent)
	} else {
		o.dst = append(o.dst, "null"...)
	}
}

func (o *jsonObject) numbers(name string, numbers []uint32) {
	o.key(name)
	o.dst = append(o.dst, '[')
	for k, n := range numbers {
		if k > 0 {
			o.dst = append(o.dst, ',')
		}
		o.dst = strconv.AppendUint(o.dst, uint64(n), 10)
	}
	o.dst = append(o.dst, ']')
}

func (o *jsonObject) raw(name string, p []byte, untag bool) {
	if p != nil {
		o.key(name)
		o.dst, _ = appendJSONValue(o.dst, p, 0, untag)
	}
}

func appendJSONHash(dst []byte, h uint64) []byte {
	dst = append(dst, '"')
	dst = strconv.AppendUint(dst, h, 10)
	return append(dst, '"')
}

func appendJSONFloat(dst []byte, v float64) []byte {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return append(dst, "null"...)
	}
	return strconv.AppendFloat(dst, v, 'f', -1, 64)
}

func appendJSONString(dst []byte, s string) []byte {
	quoted, err := json.Marshal(s)
	if err != nil {
		return append(dst, `""`...)
	}
	return append(dst, quoted...)
}

// appendJSONValue appends the MessagePack value at i, which is well formed, and
// returns where it ends. untag leaves out the key "type" of maps.
func appendJSONValue(dst, p []byte, i int, untag bool) ([]byte, int) {
	v, _ := readValue(p, i)
	end := v.at + v.n
	switch v.class {
	case classBool:
		return strconv.AppendBool(dst, v.bits == 1), v.at
	case classUint:
		return strconv.AppendUint(dst, v.bits, 10), v.at
	case classInt:
		return strconv.AppendInt(dst, int64(v.bits), 10), v.at
	case classFloat:
		return appendJSONFloat(dst, math.Float64frombits(v.bits)), v.at
	case classStr:
		return appendJSONString(dst, string(p[v.at:end])), end
	case classBin, classExt:
		return appendJSONString(dst, hex.EncodeToString(p[v.at:end])), end
	case classArray:
		dst = append(dst, '[')
		at := v.at
		for k := range v.n {
			if k > 0 {
				dst = append(dst, ',')
			}
			dst, at = appendJSONValue(dst, p, at, untag)
		}
		return append(dst, ']'), at
	case classMap:
		return appendJSONMap(dst, p, v, untag)
	default:
		return append(dst, "null"...), v.at
	}
}

func appendJSONMap(dst, p []byte, v value, untag bool) ([]byte, int) {
	dst = append(dst, '{')
	at := v.at
	n := 0
	for range v.n {
		var key []byte
		name, _ := readValue(p, at)
		if name.class == classStr {
			at = name.at + name.n
			key = appendJSONString(nil, string(p[name.at:at]))
			if untag && string(p[name.at:at]) == "type" {
				at, _ = skip(p, at, 0)
				continue
			}
		} else {
			key, at = appendJSONValue(nil, p, at, false)
			key = appendJSONString(nil, string(key))
		}
		if n > 0 {
			dst = append(dst, ',')
		}
		n++
		dst = append(dst, key...)
		dst = append(dst, ':')
		dst, at = appendJSONValue(dst, p, at, untag)
	}
	return append(dst, '}'), at
}
