package wire_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvcast/kvcast/internal/wire"
)

// obj is a MessagePack map.
type obj map[string]any

// raw is encoded MessagePack.
type raw []byte

// pack encodes v. The keys of maps are in alphabetical order.
func pack(tb testing.TB, v any) []byte {
	tb.Helper()
	return appendValue(tb, nil, v)
}

func appendValue(tb testing.TB, b []byte, v any) []byte {
	tb.Helper()
	switch v := v.(type) {
	case raw:
		return append(b, v...)
	case []any:
		b = msgp.AppendArrayHeader(b, uint32(len(v)))
		for _, e := range v {
			b = appendValue(tb, b, e)
		}
		return b
	case obj:
		b = msgp.AppendMapHeader(b, uint32(len(v)))
		keys := make([]string, 0, len(v))
		for k := range v {
			keys = append(keys, k)
		}
		slices.Sort(keys)
		for _, k := range keys {
			b = msgp.AppendString(b, k)
			b = appendValue(tb, b, v[k])
		}
		return b
	default:
		b, err := msgp.AppendIntf(b, v)
		if err != nil {
			tb.Fatal(err)
		}
		return b
	}
}

// batchOf is an array batch of events.
func batchOf(events ...any) []any { return []any{1.5, events, 0} }

// decodeOf decodes a batch of events.
func decodeOf(tb testing.TB, events ...any) *wire.Batch {
	tb.Helper()
	var d wire.Decoder
	b, err := d.Decode(pack(tb, batchOf(events...)))
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// admit returns the events that new Rules admit, and the counts of the others.
func admit(tb testing.TB, events ...any) ([]wire.Event, wire.Counts) {
	tb.Helper()
	var (
		size   wire.BlockSize
		counts wire.Counts
	)
	b := decodeOf(tb, events...)
	wire.NewRules(&size).Admit(b, 0, &counts)
	return b.Events, counts
}

// list returns a list of n encoded elements.
func list(n int, elements []byte) raw {
	return append(msgp.AppendArrayHeader(nil, uint32(n)), elements...)
}

// same returns a list of n equal elements.
func same(n int, element string) raw { return list(n, bytes.Repeat([]byte(element), n)) }

// distinct returns a list of n distinct hashes in the shortest encoding.
func distinct(n int) raw {
	var b []byte
	for k := range n {
		b = msgp.AppendUint64(b, uint64(k))
	}
	return list(n, b)
}

// oversized makes payloads of some n bytes that declare, or need, much more memory.
var oversized = map[string]func(tb testing.TB, n int) []byte{
	"bad events": func(tb testing.TB, n int) []byte {
		return pack(tb, []any{1, same(min(n, wire.MaxEvents), "\x05")})
	},
	"small events": func(tb testing.TB, n int) []byte {
		return pack(tb, []any{1, same(min(n/15, wire.MaxEvents), "\x92\xacBlockRemoved\x90")})
	},
	"small events, then bad ones": func(tb testing.TB, n int) []byte {
		const good = 1000
		n = min(n, wire.MaxEvents-good)
		events := bytes.Repeat([]byte("\x92\xacBlockRemoved\x90"), good)
		return pack(tb, []any{1, list(good+n, append(events, bytes.Repeat([]byte{0x90}, n)...))})
	},
	"events as large as the smallest, but bad": func(tb testing.TB, n int) []byte {
		return pack(tb, []any{1, same(min(n/15, wire.MaxEvents), "\x92\xacBlockRemoved\x05")})
	},
	"clears": func(tb testing.TB, n int) []byte {
		return pack(tb, []any{1, same(min(n/18, wire.MaxEvents), "\x91\xb0AllBlocksCleared")})
	},
	"clears in maps": func(tb testing.TB, n int) []byte {
		return pack(tb, []any{1, same(min(n/20, wire.MaxEvents), "\x81\xaaevent_type\xa7cleared")})
	},
	"stores of nothing": func(tb testing.TB, n int) []byte {
		return pack(tb, []any{1, same(min(n/17, wire.MaxEvents), "\x95\xabBlockStored\x90\xc0\x90\x00")})
	},
	"stores of a block": func(tb testing.TB, n int) []byte {
		return pack(tb, []any{1, same(min(n/19, wire.MaxEvents), "\x95\xabBlockStored\x91\x00\xc0\x91\x00\x01")})
	},
	"stores of nothing but extra keys": func(tb testing.TB, n int) []byte {
		return pack(tb, []any{1, same(min(n/21, wire.MaxEvents), "\x99\xabBlockStored\x90\xc0\x90\x00\xc0\xc0\xc0\x90")})
	},
	"stores of nothing but mm infos": func(tb testing.TB, n int) []byte {
		return pack(tb, []any{1, same(min(n/22, wire.MaxEvents), "\x9a\xabBlockStored\x90\xc0\x90\x00\xc0\xc0\xc0\xc0\x90")})
	},
	"stores of nothing but a window": func(tb testing.TB, n int) []byte {
		return pack(tb, []any{1, same(min(n/24, wire.MaxEvents), "\x9c\xabBlockStored\x90\xc0\x90\x00\xc0\xc0\xc0\xc0\xc0\xc0\x00")})
	},
	"stores of nothing but all that is rare": func(tb testing.TB, n int) []byte {
		return pack(tb, []any{1, same(min(n/25, wire.MaxEvents), "\x9d\xabBlockStored\x90\xc0\x90\x00\xc0\xc0\xc0\x90\x90\xc0\xc0\x00")})
	},
	"clears elsewhere": func(tb testing.TB, n int) []byte {
		return pack(tb, []any{1, same(min(n/32, wire.MaxEvents), "\x82\xaaevent_type\xa7cleared\xa8locality\xa2xy")})
	},
	"events that are named again and again": func(_ testing.TB, n int) []byte {
		b := []byte{0xde, 0, 0}
		for k := 1; len(b)+20*k < n; k *= 2 {
			b = append(append(b, "\xa6events"...), same(k, "\x92\xacBlockRemoved\x90")...)
			b[2]++
		}
		return b
	},
	"claims of lists that end at once": func(tb testing.TB, n int) []byte {
		n = min(n, wire.MaxEvents)
		claim := string(list(n, nil))
		events := bytes.Repeat([]byte("\x92\xacBlockRemoved"+claim+"\xc0"), 1)
		events = append(events, "\x94\xabBlockStored\x90\xc0"+claim+"\xc0"...)
		return pack(tb, []any{1, list(n, append(events, bytes.Repeat([]byte("\x92\xacBlockRemoved\x90"), n/15)...))})
	},
	"a hash after many": func(tb testing.TB, n int) []byte {
		return pack(tb, batchOf([]any{"BlockRemoved", same(min(n, wire.MaxBlocks-1), "\x00")}, []any{"BlockRemoved", []any{1}}))
	},
	"a token after many": func(tb testing.TB, n int) []byte {
		store := func(n int) []any { return []any{"BlockStored", []any{1}, nil, same(n, "\x00"), 1} }
		return pack(tb, batchOf(store(n), store(1)))
	},
	"a long list of tokens before short ones": func(tb testing.TB, n int) []byte {
		lists := append(same(n/2, "\x00"), bytes.Repeat([]byte{0x90}, n/2)...)
		return pack(tb, batchOf([]any{"BlockStored", []any{1}, nil, list(1+n/2, lists), 1}))
	},
	"a short list of tokens before long ones": func(tb testing.TB, n int) []byte {
		lists := []any{same(1, "\x00")}
		for k := 1; k < n/2; k *= 2 {
			lists = append(lists, same(k, "\x00"))
		}
		return pack(tb, batchOf([]any{"BlockStored", []any{1}, nil, lists, 1}))
	},
	"names that change": func(tb testing.TB, n int) []byte {
		n = min(n, 40*wire.MaxEvents)
		var events []byte
		for k := range n / 40 {
			ev := obj{"type": "BlockRemoved", "block_hashes": []any{}, "x": nil, "medium": fmt.Sprintf("%02x", k%256)}
			events = append(events, pack(tb, ev)...)
		}
		return pack(tb, []any{1, list(n/40, events)})
	},
	"small tokens": func(tb testing.TB, n int) []byte {
		return pack(tb, batchOf([]any{"BlockStored", []any{1}, nil, same(n, "\x00"), 1}))
	},
	"small pairs": func(tb testing.TB, n int) []byte {
		return pack(tb, batchOf([]any{"BlockStored", []any{1}, nil, same(n/3, "\x92\x01\x02"), 1}))
	},
	"one long list claimed by many": func(tb testing.TB, n int) []byte {
		return pack(tb, batchOf([]any{"BlockStored", []any{1}, nil, list(n, list(n, make([]byte, n))), 1}))
	},
	"small hashes": func(tb testing.TB, n int) []byte {
		return pack(tb, batchOf([]any{"BlockRemoved", same(min(n, wire.MaxBlocks), "\x00")}))
	},
	"lists of hashes that get longer": func(tb testing.TB, n int) []byte {
		var events []any
		for k := 1; k < min(n, wire.MaxBlocks); k *= 2 {
			events = append(events, []any{"BlockRemoved", same(k/2+1, "\x00")})
		}
		return pack(tb, batchOf(events...))
	},
	"hashes that run out": func(tb testing.TB, n int) []byte {
		return pack(tb, []any{1, same(min(n/17, wire.MaxEvents), "\x92\xacBlockRemoved\xdc\x04\x00")})
	},
	"a hash that repeats": func(tb testing.TB, n int) []byte {
		return pack(tb, batchOf([]any{"BlockStored", same(min(n, wire.MaxBlocks), "\x00"), nil, []any{}, 0}))
	},
	"hashes that differ": func(tb testing.TB, n int) []byte {
		return pack(tb, batchOf([]any{"BlockStored", distinct(n / 5), nil, []any{}, 0}))
	},
	"small counts of copies": func(tb testing.TB, n int) []byte {
		return pack(tb, batchOf(obj{"type": "BlockRemoved", "block_hashes": same(min(n/2, wire.MaxBlocks), "\x00"), "remaining_copy_counts": same(min(n/2, wire.MaxBlocks), "\x00")}))
	},
	"counts of copies of nothing": func(tb testing.TB, n int) []byte {
		return pack(tb, batchOf(obj{"type": "BlockRemoved", "block_hashes": []any{}, "remaining_copy_counts": same(n, "\x00")}))
	},
	"removes with a count": func(tb testing.TB, n int) []byte {
		ev := pack(tb, obj{"event_type": "removed", "seq_hashes": []any{0}, "remaining_copy_counts": []any{0}})
		return pack(tb, []any{1, same(min(n/len(ev), wire.MaxEvents), string(ev))})
	},
	"counts of copies that are named again and again": func(_ testing.TB, n int) []byte {
		b := []byte("\x92\x01\x91\xde\x00\x02\xa4type\xacBlockRemoved\xacblock_hashes\x90")
		for k := 1; len(b)+2*k < n; k *= 2 {
			b = append(append(b, "\xb5remaining_copy_counts"...), same(k, "\x00")...)
			b[5]++
		}
		return b
	},
	"counts of copies that run out": func(tb testing.TB, n int) []byte {
		return pack(tb, batchOf(removed(obj{"remaining_copy_counts": list(n, append(make([]byte, n-1), 0xff))}, 1)))
	},
	"claims of counts that end at once": func(tb testing.TB, n int) []byte {
		ev := pack(tb, obj{"event_type": "removed", "seq_hashes": []any{}, "remaining_copy_counts": list(n, []byte{0xc0})})
		return pack(tb, []any{1, same(min(n/len(ev), wire.MaxEvents), string(ev))})
	},
	"extra keys beyond the blocks": func(tb testing.TB, n int) []byte {
		keys := list(n, append(bytes.Repeat([]byte{0xc0}, n-1), 0x90))
		return pack(tb, batchOf([]any{"BlockStored", []any{1}, nil, []any{1}, 1, nil, nil, nil, keys}))
	},
	"extra keys of many blocks": func(tb testing.TB, n int) []byte {
		n = min(n/8, wire.MaxBlocks)
		keys := list(n, append(pack(tb, []any{[]any{"", 0}}), bytes.Repeat([]byte{0x90}, n-1)...))
		return pack(tb, batchOf([]any{"BlockStored", distinct(n), nil, same(n, "\x00"), 1, nil, nil, nil, keys}))
	},
	"many extra keys of a block": func(tb testing.TB, n int) []byte {
		keys := []any{same(n/3, "\x92\xa0\x00")}
		return pack(tb, batchOf([]any{"BlockStored", []any{1}, nil, []any{1}, 1, nil, nil, nil, keys}))
	},
	"long names": func(tb testing.TB, n int) []byte {
		name := strings.Repeat("x", n/6)
		return pack(tb, batchOf(stored(obj{
			"lora_name": name, "medium": name, "kv_cache_spec_kind": name,
			"locality": name, "ownership": name, "model_name": name,
		}, 1)))
	},
	"a long salt": func(tb testing.TB, n int) []byte {
		return pack(tb, batchOf(stored(obj{"extra_keys": []any{[]any{"dynamo-cache-salt:" + strings.Repeat("x", n)}}}, 1)))
	},
}
