package wire_test

import (
	"encoding/binary"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/wire"
)

// engineForm is how an engine encodes batches. The zero value is vLLM's newest array form.
type engineForm struct {
	batchForm, eventForm wire.Form
	// mixed encodes every second event in the other form than eventForm.
	mixed    bool
	producer producer
	hashes   hashForm
	// fields is the largest number of elements in an array store, its tag included: older
	// versions have fewer, at least 5. 0 means all.
	fields int
}

type producer int

const (
	vllm producer = iota
	// sglang is SGLang 0.5.18, whose array stores end with a map of cache salt and session
	// id instead of the LoRA name.
	sglang
	// dynamo is Dynamo's lineage, whose array stores have block_mm_infos before the
	// attention group.
	dynamo
	// aibrix and mooncake encode all events as maps.
	aibrix
	mooncake
)

type hashForm int

const (
	hashUnsigned hashForm = iota
	// hashSigned is a negative integer for hashes from 1<<63 on.
	hashSigned
	// hashBytes is 32 bytes, the last 8 of which are the hash.
	hashBytes
)

// engineForms draws any form, plainForms only forms that an Encoder writes.
var (
	engineForms = rapid.Custom(func(t *rapid.T) engineForm {
		f := plainForms.Draw(t, "forms")
		f.mixed = rapid.Bool().Draw(t, "mixed")
		f.producer = rapid.SampledFrom([]producer{vllm, sglang, dynamo, aibrix, mooncake}).Draw(t, "producer")
		f.hashes = rapid.SampledFrom([]hashForm{hashUnsigned, hashSigned, hashBytes}).Draw(t, "hashes")
		f.fields = rapid.SampledFrom([]int{0, 0, 5, 6, 7, 8, 9, 10, 11, 12, 13}).Draw(t, "fields")
		return f
	})
	plainForms = rapid.Custom(func(t *rapid.T) engineForm {
		forms := rapid.SampledFrom([]wire.Form{wire.FormArray, wire.FormMap})
		return engineForm{batchForm: forms.Draw(t, "batch form"), eventForm: forms.Draw(t, "event form")}
	})
)

// inMap reports whether the k-th event of a batch is a map.
func (f engineForm) inMap(k int) bool {
	return f.producer >= aibrix || (f.eventForm == wire.FormMap) != (f.mixed && k%2 == 1)
}

// has reports whether the k-th event has the fields that were added to arrays when array
// stores had a length of n.
func (f engineForm) has(k, n int) bool { return f.inMap(k) || f.fields == 0 || f.fields >= n }

// encode encodes a batch, whose events have only fields that the form has.
func (f engineForm) encode(tb testing.TB, b *wire.Batch) []byte {
	tb.Helper()
	events := make([]any, len(b.Events))
	for k := range b.Events {
		if f.inMap(k) {
			events[k] = f.mapEvent(&b.Events[k])
		} else {
			events[k] = f.arrayEvent(&b.Events[k])
		}
	}
	ts, rank := valueIf(b.HasTime, b.Time), valueIf(b.HasRank, b.Rank)
	if f.batchForm == wire.FormMap {
		batch := obj{"ts": ts, "events": events, "data_parallel_rank": rank}
		if b.PublisherID != nil {
			batch["publisher_id"] = b.PublisherID
		}
		return pack(tb, batch)
	}
	batch := []any{ts, events, rank}
	if b.PublisherID != nil {
		batch = append(batch, b.PublisherID)
	}
	return pack(tb, batch)
}

// valueIf returns v if it is set, and nil otherwise.
func valueIf[T any](isSet bool, v T) any {
	if isSet {
		return v
	}
	return nil
}

func (f engineForm) mapEvent(ev *wire.Event) obj {
	m := f.members(ev)
	for key, v := range m {
		if v == nil && key != "parent_block_hash" && key != "lora_id" && key != "lora_name" {
			delete(m, key)
		}
	}
	switch f.producer {
	case aibrix:
		m["type"] = [...]string{"", "BLOCK_STORED", "BLOCK_REMOVED", "ALL_BLOCKS_CLEARED"}[ev.Kind]
		delete(m, "block_size")
	case mooncake:
		m["event_type"] = [...]string{"", "stored", "removed", "cleared"}[ev.Kind]
		if hashes, ok := m["block_hashes"]; ok {
			m["seq_hashes"] = hashes
			delete(m, "block_hashes")
		}
		if ev.BlockSize == 0 && len(ev.Tokens) == 0 && !ev.OpaqueTokens {
			delete(m, "block_size")
			delete(m, "token_ids")
		}
	default:
		m["type"] = vllmTags[ev.Kind]
	}
	return m
}

var vllmTags = [...]string{"", "BlockStored", "BlockRemoved", "AllBlocksCleared"}

func (f engineForm) arrayEvent(ev *wire.Event) []any {
	m := f.members(ev)
	event := []any{vllmTags[ev.Kind]}
	var names []string
	limit := 0
	switch ev.Kind {
	case wire.KindStored:
		names = []string{"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"}
		limit = f.fields - 1
		switch f.producer {
		case sglang:
			m["metadata"] = obj{"cache_salt": m["cache_salt"], "session_id": m["session_id"]}
			names = append(names, "metadata")
		case dynamo:
			names = append(names, "lora_name", "extra_keys", "block_mm_infos", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
		default:
			names = append(names, "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
		}
	case wire.KindRemoved:
		names = []string{"block_hashes", "medium", "group_idx"}
		limit = 3
		if f.fields < 10 {
			limit = 2
		}
		if f.fields < 7 {
			limit = 1
		}
	case wire.KindCleared:
	}
	if f.fields != 0 {
		names = names[:min(len(names), limit)]
	}
	for _, name := range names {
		event = append(event, m[name])
	}
	return event
}

// members returns the fields of an event by their keys in maps; nil if they are not set.
func (f engineForm) members(ev *wire.Event) obj {
	var (
		raws wire.Raw
		rare wire.Rare
	)
	if ev.Raw != nil {
		raws = *ev.Raw
	}
	if ev.Rare != nil {
		rare = *ev.Rare
	}
	text := func(s string) any { return valueIf(s != "", s) }
	list := func(b []byte) any { return valueIf(b != nil, raw(b)) }
	m := obj{
		"medium":                       text(ev.Medium),
		"group_idx":                    valueIf(ev.HasGroupIdx, ev.GroupIdx),
		"kv_cache_spec_kind":           text(ev.SpecKind),
		"kv_cache_spec_sliding_window": valueIf(rare.HasSlidingWindow, rare.SlidingWindow),
		"cache_salt":                   text(ev.CacheSalt),
		"locality":                     text(rare.Locality),
		"ownership":                    text(rare.Ownership),
		"model_name":                   text(rare.ModelName),
		"object_key":                   valueIf(rare.HasObjectKey, "key"),
		"timestamp":                    valueIf(rare.HasTime, rare.Time),
	}
	if ev.Kind != wire.KindCleared {
		m["block_hashes"] = listOf(ev.BlockHashes, f.hash)
	}
	if rare.RemainingCopies != nil {
		m["remaining_copy_counts"] = listOf(rare.RemainingCopies, number)
	}
	if ev.Kind != wire.KindStored {
		m["reason"] = text(rare.Note)
		return m
	}
	m["session_id"] = text(rare.Note)
	m["parent_block_hash"] = nil
	if ev.HasParent {
		m["parent_block_hash"] = f.hash(ev.Parent)
	}
	m["token_ids"] = f.tokens(ev)
	m["block_size"] = ev.BlockSize
	m["lora_id"] = valueIf(ev.HasLoRAID, ev.LoRAID)
	m["lora_name"] = text(ev.LoRAName)
	m["extra_keys"] = list(raws.ExtraKeys)
	m["block_mm_infos"] = list(raws.BlockMMInfos)
	m["mm_keys"] = list(raws.MMKeys)
	m["origin"] = [...]any{nil, "NEW", "REUSED"}[ev.Origin]
	return m
}

func (f engineForm) hash(h uint64) any {
	switch f.hashes {
	case hashSigned:
		return int64(h)
	case hashBytes:
		b := make([]byte, 24, 32)
		for k := range b {
			b[k] = byte(k + 1) // the rest of a digest
		}
		return binary.BigEndian.AppendUint64(b, h)
	default:
		return h
	}
}

// tokens returns a store's tokens: one list per block for AIBrix, otherwise one list.
func (f engineForm) tokens(ev *wire.Event) []any {
	tokens := ev.Tokens
	lists := []any{}
	switch {
	case f.producer == aibrix:
		for len(tokens) > 0 {
			n := min(int(ev.BlockSize), len(tokens))
			lists = append(lists, listOf(tokens[:n], number))
			tokens = tokens[n:]
		}
		return lists
	case ev.OpaqueTokens:
		return []any{""}
	case ev.Eagle:
		for k := range tokens[1:] {
			lists = append(lists, listOf(tokens[k:k+2], number))
		}
		return lists
	default:
		return listOf(tokens, number)
	}
}

func number(n uint32) any { return n }

func listOf[T any](list []T, convert func(T) any) []any {
	all := make([]any, len(list))
	for k, v := range list {
		all[k] = convert(v)
	}
	return all
}
