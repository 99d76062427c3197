package wire

import (
	"encoding/binary"

	"github.com/tinylib/msgp/msgp"
)

// Producer is whose form of events an Encoder writes.
type Producer uint8

// The producers.
const (
	// ProducerVLLM is vLLM, and all who took its form over as it is.
	ProducerVLLM Producer = iota
	// ProducerSGLang is SGLang 0.5.18, whose array stores end with a map of cache
	// salt and session in the place of the LoRA name. Its maps are vLLM's.
	ProducerSGLang
	// ProducerDynamo is who puts block_mm_infos into array stores, before the
	// attention group. Its maps are vLLM's.
	ProducerDynamo
	// ProducerAIBrix is AIBrix's own encoder: maps alone, the tokens in a list for
	// each block, which tell the block size.
	ProducerAIBrix
	// ProducerMooncake is Mooncake: maps alone, with seq_hashes, and nil for tokens
	// and block size where there are none.
	ProducerMooncake
)

// HashForm is how an Encoder writes block hashes.
type HashForm uint8

// The forms of block hashes.
const (
	// HashUnsigned is an integer, never negative.
	HashUnsigned HashForm = iota
	// HashSigned is an integer, negative for hashes from 1<<63 on.
	HashSigned
	// HashBytes is 32 bytes, the last 8 of which are the hash.
	HashBytes
)

// Encoder writes batches as engines do, each number in its shortest form. The
// zero value writes arrays as vLLM does.
type Encoder struct {
	// BatchForm and EventForm are the forms of batches and of events. Events of
	// AIBrix and Mooncake are maps whatever EventForm is.
	BatchForm Form
	EventForm Form
	// Mixed gives every second event the other form.
	Mixed    bool
	Producer Producer
	Hashes   HashForm
	// Fields is how many elements an array store has at most, its tag included, as
	// older versions have fewer: 5 to 13, or 0 for all. Removes lack what stores of
	// that version lack.
	Fields int
}

// The bounds of Encoder.Fields: hashes, parent, tokens and block size with their
// tag, and all that the longest array has, which is Dynamo's.
const (
	minFields = 5
	maxFields = 13
)

// AppendBatch appends the batch to dst: its time, its rank, its publisher id and its
// events with their fields up to Rare. It decodes to the same batch again, but for
// Index, which counts from 0, and for what array events of fewer Fields leave out.
//
// A batch that has no such encoding is refused with an *EncodeError, and dst is
// returned as it is. So is one that the Encoder's form has no place for:
//
//   - Array events have no Locality, Ownership, ModelName, Time, MMKeys, Origin or
//     RemainingCopies. Only SGLang's have CacheSalt and SessionID, but neither
//     LoRAName nor what comes after it; only Dynamo's have BlockMMInfos. Removes in
//     arrays have neither SpecKind nor SlidingWindow.
//   - EAGLE tokens go as pairs, at least one; opaque ones as one placeholder.
//     AIBrix has neither, and the length of its first block is the BlockSize, which
//     is 0 where there are no tokens.
//   - ExtraKeys and the other raw values must each be one well-formed list, strings
//     UTF-8, and times finite and at most 1e11 seconds.
func (e *Encoder) AppendBatch(dst []byte, b *Batch) ([]byte, error) {
	if err := e.check(b); err != nil {
		return dst, err
	}
	return e.appendBatch(dst, b), nil
}

// appendBatch is AppendBatch for a batch that has been checked.
func (e *Encoder) appendBatch(dst []byte, b *Batch) []byte {
	if e.BatchForm == FormMap {
		n := uint32(1)
		if b.HasTime {
			n++
		}
		if b.HasRank {
			n++
		}
		if b.PublisherID != nil {
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
		if b.PublisherID != nil {
			dst = msgp.AppendString(dst, "publisher_id")
			dst = msgp.AppendBytes(dst, b.PublisherID)
		}
		return dst
	}
	if b.PublisherID == nil {
		dst = msgp.AppendArrayHeader(dst, 3)
	} else {
		dst = msgp.AppendArrayHeader(dst, 4)
	}
	if b.HasTime {
		dst = msgp.AppendFloat64(dst, b.Time)
	} else {
		dst = msgp.AppendNil(dst)
	}
	dst = e.appendEvents(dst, b.Events)
	if b.HasRank {
		dst = msgp.AppendUint32(dst, b.Rank)
	} else {
		dst = msgp.AppendNil(dst)
	}
	if b.PublisherID != nil {
		dst = msgp.AppendBytes(dst, b.PublisherID)
	}
	return dst
}

func (e *Encoder) appendEvents(dst []byte, events []Event) []byte {
	dst = msgp.AppendArrayHeader(dst, uint32(len(events)))
	for k := range events {
		if e.asMap(k) {
			dst = e.appendMapEvent(dst, &events[k])
		} else {
			dst = e.appendArrayEvent(dst, &events[k])
		}
	}
	return dst
}

// appendArrayEvent writes every field that the producer declares, nil where
// unset.
func (e *Encoder) appendArrayEvent(dst []byte, ev *Event) []byte {
	a := arrayWriter{dst: dst, header: len(dst), most: e.Fields}
	a.dst = append(a.dst, 0)
	switch ev.Kind {
	case KindStored:
		a.put(msgp.AppendString(a.dst, "BlockStored"))
		a.put(e.appendHashes(a.dst, ev.BlockHashes))
		a.put(e.appendParent(a.dst, ev))
		a.put(appendTokenIDs(a.dst, ev))
		a.put(msgp.AppendUint32(a.dst, ev.BlockSize))
		a.put(appendInt(a.dst, ev.LoRAID, ev.HasLoRAID))
		a.put(appendString(a.dst, ev.Medium))
		if e.Producer == ProducerSGLang {
			a.put(appendMetadata(a.dst, ev))
			break
		}
		a.put(appendString(a.dst, ev.LoRAName))
		a.put(appendRaw(a.dst, ev.raw().ExtraKeys))
		if e.Producer == ProducerDynamo {
			a.put(appendRaw(a.dst, ev.raw().BlockMMInfos))
		}
		a.put(appendInt(a.dst, ev.GroupIdx, ev.HasGroupIdx))
		a.put(appendString(a.dst, ev.SpecKind))
		a.put(appendInt(a.dst, ev.rare().SlidingWindow, ev.rare().HasSlidingWindow))
	case KindRemoved:
		switch {
		case a.most == 0:
		case a.most < storedWithMedium:
			a.most = 2
		case a.most < storedWithGroup:
			a.most = 3
		}
		a.put(msgp.AppendString(a.dst, "BlockRemoved"))
		a.put(e.appendHashes(a.dst, ev.BlockHashes))
		a.put(appendString(a.dst, ev.Medium))
		a.put(appendInt(a.dst, ev.GroupIdx, ev.HasGroupIdx))
	case KindCleared:
		a.put(msgp.AppendString(a.dst, "AllBlocksCleared"))
	}
	a.dst[a.header] = 0x90 | byte(a.n)
	return a.dst
}

// How long the stores of those versions are whose removes have these fields.
const (
	storedWithMedium = 7
	storedWithGroup  = 10
)

// appendMetadata writes the map that SGLang 0.5.18 puts in the place of the LoRA
// name.
func appendMetadata(dst []byte, ev *Event) []byte {
	header := len(dst)
	m := mapWriter{dst: append(dst, 0)}
	m.string("cache_salt", ev.CacheSalt)
	m.string("session_id", ev.rare().SessionID)
	return m.close(header)
}

// tags are how producers call events in maps: by which key, and by which name.
var tags = map[Producer]struct {
	key   string
	kinds [KindCleared + 1]string
}{
	ProducerAIBrix:   {"type", [...]string{KindStored: "BLOCK_STORED", KindRemoved: "BLOCK_REMOVED", KindCleared: "ALL_BLOCKS_CLEARED"}},
	ProducerMooncake: {"event_type", [...]string{KindStored: "stored", KindRemoved: "removed", KindCleared: "cleared"}},
	ProducerVLLM:     {"type", [...]string{KindStored: "BlockStored", KindRemoved: "BlockRemoved", KindCleared: "AllBlocksCleared"}},
}

// appendMapEvent writes the fields that the producer always writes, and of the
// others those that are set.
func (e *Encoder) appendMapEvent(dst []byte, ev *Event) []byte {
	header := len(dst)
	m := mapWriter{dst: append(dst, 0)}
	called, ok := tags[e.Producer]
	if !ok {
		called = tags[ProducerVLLM]
	}
	m.string(called.key, called.kinds[ev.Kind])
	if ev.Kind != KindCleared {
		hashes := "block_hashes"
		if e.Producer == ProducerMooncake {
			hashes = "seq_hashes"
		}
		m.key(hashes)
		m.dst = e.appendHashes(m.dst, ev.BlockHashes)
		if ev.Kind == KindStored {
			m.key("parent_block_hash")
			m.dst = e.appendParent(m.dst, ev)
			e.appendContent(&m, ev)
			m.key("lora_id")
			m.dst = appendInt(m.dst, ev.LoRAID, ev.HasLoRAID)
		}
		m.key("medium")
		m.dst = appendString(m.dst, ev.Medium)
		if ev.Kind == KindStored {
			m.key("lora_name")
			m.dst = appendString(m.dst, ev.LoRAName)
			m.raw("extra_keys", ev.raw().ExtraKeys)
		}
		m.int("group_idx", ev.GroupIdx, ev.HasGroupIdx)
		m.string("kv_cache_spec_kind", ev.SpecKind)
		m.int("kv_cache_spec_sliding_window", ev.rare().SlidingWindow, ev.rare().HasSlidingWindow)
	}
	m.string("locality", ev.rare().Locality)
	m.string("ownership", ev.rare().Ownership)
	m.string("session_id", ev.rare().SessionID)
	m.string("cache_salt", ev.CacheSalt)
	m.string("model_name", ev.rare().ModelName)
	if ev.rare().HasTime {
		m.key("timestamp")
		m.dst = msgp.AppendFloat64(m.dst, ev.rare().Time)
	}
	if ev.Kind == KindStored {
		m.raw("block_mm_infos", ev.raw().BlockMMInfos)
		m.raw("mm_keys", ev.raw().MMKeys)
		if ev.Origin != OriginUnknown {
			m.string("origin", ev.Origin.String())
		}
	}
	if copies := ev.rare().RemainingCopies; ev.Kind == KindRemoved && copies != nil {
		m.key("remaining_copy_counts")
		m.dst = appendNumbers(m.dst, copies)
	}
	return m.close(header)
}

// appendContent writes a store's tokens and block size into a map.
func (e *Encoder) appendContent(m *mapWriter, ev *Event) {
	m.key("token_ids")
	if e.Producer == ProducerAIBrix {
		m.dst = appendNested(m.dst, ev.Tokens, int(ev.BlockSize))
		return
	}
	if e.Producer == ProducerMooncake && ev.hashOnly() {
		m.dst = msgp.AppendNil(m.dst)
		m.key("block_size")
		m.dst = msgp.AppendNil(m.dst)
		return
	}
	m.dst = appendTokenIDs(m.dst, ev)
	m.key("block_size")
	m.dst = msgp.AppendUint32(m.dst, ev.BlockSize)
}

// appendNested writes tokens as a list of blocks.
func appendNested(dst []byte, tokens []uint32, size int) []byte {
	blocks := 0
	if size > 0 {
		blocks = (len(tokens) + size - 1) / size
	}
	dst = msgp.AppendArrayHeader(dst, uint32(blocks))
	for range blocks {
		n := min(size, len(tokens))
		dst = appendNumbers(dst, tokens[:n])
		tokens = tokens[n:]
	}
	return dst
}

func (e *Encoder) appendHashes(dst []byte, hashes []uint64) []byte {
	dst = msgp.AppendArrayHeader(dst, uint32(len(hashes)))
	for _, h := range hashes {
		dst = e.appendHash(dst, h)
	}
	return dst
}

func (e *Encoder) appendHash(dst []byte, h uint64) []byte {
	switch e.Hashes {
	case HashSigned:
		return msgp.AppendInt64(dst, int64(h))
	case HashBytes:
		var b [32]byte
		binary.BigEndian.PutUint64(b[24:], h)
		for k := range 24 {
			b[k] = byte(k + 1) // as of a digest, none of it is the hash
		}
		return msgp.AppendBytes(dst, b[:])
	default:
		return msgp.AppendUint64(dst, h)
	}
}

func (e *Encoder) appendParent(dst []byte, ev *Event) []byte {
	if !ev.HasParent {
		return msgp.AppendNil(dst)
	}
	return e.appendHash(dst, ev.Parent)
}

func appendTokenIDs(dst []byte, ev *Event) []byte {
	switch {
	case ev.OpaqueTokens:
		dst = msgp.AppendArrayHeader(dst, 1)
		return msgp.AppendString(dst, "")
	case ev.Eagle:
		dst = msgp.AppendArrayHeader(dst, uint32(len(ev.Tokens)-1))
		for k, t := range ev.Tokens[1:] {
			dst = msgp.AppendArrayHeader(dst, 2)
			dst = msgp.AppendUint32(dst, ev.Tokens[k])
			dst = msgp.AppendUint32(dst, t)
		}
		return dst
	default:
		return appendNumbers(dst, ev.Tokens)
	}
}

func appendNumbers(dst []byte, numbers []uint32) []byte {
	dst = msgp.AppendArrayHeader(dst, uint32(len(numbers)))
	for _, n := range numbers {
		dst = msgp.AppendUint32(dst, n)
	}
	return dst
}
