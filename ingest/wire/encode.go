package wire

import (
	"github.com/tinylib/msgp/msgp"
)

// Encoder writes batches as vLLM does, each number in its shortest form. The
// zero value writes arrays.
type Encoder struct {
	// BatchForm and EventForm are the forms of batches and of events.
	BatchForm Form
	EventForm Form
}

// AppendBatch appends the batch to dst: its time, its rank and its events with
// their fields up to SlidingWindow. What decodes to the same batch again is
// what the form can carry: array events have no Locality, Ownership, CacheSalt,
// SessionID, ModelName, Time, BlockMMInfos or MMKeys. EAGLE tokens go as pairs,
// opaque ones as one placeholder. ExtraKeys and the other raw values must be
// well-formed lists.
func (e *Encoder) AppendBatch(dst []byte, b *Batch) []byte {
	if e.BatchForm == FormMap {
		n := uint32(1)
		if b.HasTime {
			n++
		}
		if b.HasRank {
			n++
		}
		dst = msgp.AppendMapHeader(dst, n)
		if b.HasTime {
			dst = msgp.AppendString(dst, "ts")
			dst = msgp.AppendFloat64(dst, b.Time)
		}
		dst = msgp.AppendString(dst, "events")
		dst = e.appendEvents(dst, b.Events)
		if b.HasRank {
			dst = msgp.AppendString(dst, "data_parallel_rank")
			dst = msgp.AppendUint32(dst, b.Rank)
		}
		return dst
	}
	dst = msgp.AppendArrayHeader(dst, 3)
	if b.HasTime {
		dst = msgp.AppendFloat64(dst, b.Time)
	} else {
		dst = msgp.AppendNil(dst)
	}
	dst = e.appendEvents(dst, b.Events)
	if b.HasRank {
		return msgp.AppendUint32(dst, b.Rank)
	}
	return msgp.AppendNil(dst)
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

// appendArrayEvent writes every field that vLLM declares, nil where unset.
func appendArrayEvent(dst []byte, ev *Event) []byte {
	switch ev.Kind {
	case KindStored:
		dst = msgp.AppendArrayHeader(dst, 12)
		dst = msgp.AppendString(dst, "BlockStored")
		dst = appendHashes(dst, ev.BlockHashes)
		dst = appendParent(dst, ev)
		dst = appendTokenIDs(dst, ev)
		dst = msgp.AppendUint32(dst, ev.BlockSize)
		dst = appendInt(dst, ev.LoRAID, ev.HasLoRAID)
		dst = appendString(dst, ev.Medium)
		dst = appendString(dst, ev.LoRAName)
		dst = appendRaw(dst, ev.ExtraKeys)
		dst = appendInt(dst, ev.GroupIdx, ev.HasGroupIdx)
		dst = appendString(dst, ev.SpecKind)
		return appendInt(dst, ev.SlidingWindow, ev.HasSlidingWindow)
	case KindRemoved:
		dst = msgp.AppendArrayHeader(dst, 4)
		dst = msgp.AppendString(dst, "BlockRemoved")
		dst = appendHashes(dst, ev.BlockHashes)
		dst = appendString(dst, ev.Medium)
		return appendInt(dst, ev.GroupIdx, ev.HasGroupIdx)
	default:
		dst = msgp.AppendArrayHeader(dst, 1)
		return msgp.AppendString(dst, "AllBlocksCleared")
	}
}

// appendMapEvent writes the fields that vLLM always writes, and of the others
// those that are set.
func appendMapEvent(dst []byte, ev *Event) []byte {
	header := len(dst)
	m := mapWriter{dst: append(dst, 0)}
	switch ev.Kind {
	case KindStored:
		m.string("type", "BlockStored")
		m.key("block_hashes")
		m.dst = appendHashes(m.dst, ev.BlockHashes)
		m.key("parent_block_hash")
		m.dst = appendParent(m.dst, ev)
		m.key("token_ids")
		m.dst = appendTokenIDs(m.dst, ev)
		m.key("block_size")
		m.dst = msgp.AppendUint32(m.dst, ev.BlockSize)
		m.key("lora_id")
		m.dst = appendInt(m.dst, ev.LoRAID, ev.HasLoRAID)
		m.key("medium")
		m.dst = appendString(m.dst, ev.Medium)
		m.key("lora_name")
		m.dst = appendString(m.dst, ev.LoRAName)
		m.raw("extra_keys", ev.ExtraKeys)
	case KindRemoved:
		m.string("type", "BlockRemoved")
		m.key("block_hashes")
		m.dst = appendHashes(m.dst, ev.BlockHashes)
		m.key("medium")
		m.dst = appendString(m.dst, ev.Medium)
	default:
		m.string("type", "AllBlocksCleared")
	}
	if ev.Kind != KindCleared {
		m.int("group_idx", ev.GroupIdx, ev.HasGroupIdx)
		m.string("kv_cache_spec_kind", ev.SpecKind)
		m.int("kv_cache_spec_sliding_window", ev.SlidingWindow, ev.HasSlidingWindow)
	}
	m.string("locality", ev.Locality)
	m.string("ownership", ev.Ownership)
	m.string("session_id", ev.SessionID)
	m.string("cache_salt", ev.CacheSalt)
	m.string("model_name", ev.ModelName)
	if ev.HasTime {
		m.key("timestamp")
		m.dst = msgp.AppendFloat64(m.dst, ev.Time)
	}
	if ev.Kind == KindStored {
		m.raw("block_mm_infos", ev.BlockMMInfos)
		m.raw("mm_keys", ev.MMKeys)
	}
	return m.close(header)
}

// mapWriter writes a map whose number of keys is not known before its end.
type mapWriter struct {
	dst []byte
	n   int
}

// close sets the header, which stands at dst[at] and has one byte of room.
func (m *mapWriter) close(at int) []byte {
	if m.n < 16 {
		m.dst[at] = 0x80 | byte(m.n)
		return m.dst
	}
	m.dst = append(m.dst, 0, 0)
	copy(m.dst[at+3:], m.dst[at+1:])
	m.dst[at], m.dst[at+1], m.dst[at+2] = 0xde, 0, byte(m.n)
	return m.dst
}

func (m *mapWriter) key(name string) {
	m.n++
	m.dst = msgp.AppendString(m.dst, name)
}

func (m *mapWriter) string(name, v string) {
	if v != "" {
		m.key(name)
		m.dst = msgp.AppendString(m.dst, v)
	}
}

func (m *mapWriter) int(name string, v int64, has bool) {
	if has {
		m.key(name)
		m.dst = msgp.AppendInt64(m.dst, v)
	}
}

func (m *mapWriter) raw(name string, v []byte) {
	if v != nil {
		m.key(name)
		m.dst = append(m.dst, v...)
	}
}

func appendHashes(dst []byte, hashes []uint64) []byte {
	dst = msgp.AppendArrayHeader(dst, uint32(len(hashes)))
	for _, h := range hashes {
		dst = msgp.AppendUint64(dst, h)
	}
	return dst
}

func appendParent(dst []byte, ev *Event) []byte {
	if !ev.HasParent {
		return msgp.AppendNil(dst)
	}
	return msgp.AppendUint64(dst, ev.Parent)
}

func appendTokenIDs(dst []byte, ev *Event) []byte {
	switch {
	case ev.OpaqueTokens:
		dst = msgp.AppendArrayHeader(dst, 1)
		return msgp.AppendString(dst, "")
	case ev.Eagle && len(ev.Tokens) > 1:
		dst = msgp.AppendArrayHeader(dst, uint32(len(ev.Tokens)-1))
		for k, t := range ev.Tokens[1:] {
			dst = msgp.AppendArrayHeader(dst, 2)
			dst = msgp.AppendUint32(dst, ev.Tokens[k])
			dst = msgp.AppendUint32(dst, t)
		}
		return dst
	default:
		dst = msgp.AppendArrayHeader(dst, uint32(len(ev.Tokens)))
		for _, t := range ev.Tokens {
			dst = msgp.AppendUint32(dst, t)
		}
		return dst
	}
}

func appendInt(dst []byte, v int64, has bool) []byte {
	if !has {
		return msgp.AppendNil(dst)
	}
	return msgp.AppendInt64(dst, v)
}

func appendString(dst []byte, s string) []byte {
	if s == "" {
		return msgp.AppendNil(dst)
	}
	return msgp.AppendString(dst, s)
}

func appendRaw(dst, v []byte) []byte {
	if v == nil {
		return msgp.AppendNil(dst)
	}
	return append(dst, v...)
}
