package wire_test

import (
	"bytes"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvcast/kvcast/ingest/wire"
)

// list is a list of n elements, which are as they stand.
func list(n int, elements []byte) raw {
	return append(msgp.AppendArrayHeader(nil, uint32(n)), elements...)
}

// same is a list of n times the same element.
func same(n int, element string) raw { return list(n, bytes.Repeat([]byte(element), n)) }

// distinct is a list of n hashes that differ, as small as they can be.
func distinct(n int) raw {
	var b []byte
	for k := range n {
		b = msgp.AppendUint64(b, uint64(k))
	}
	return list(n, b)
}

// greedy makes payloads of some n bytes that ask for much more memory than they
// are.
var greedy = map[string]func(tb testing.TB, n int) []byte{
	"bad events": func(tb testing.TB, n int) []byte {
		return pack(tb, []any{1, same(n, "\x05")})
	},
	"small events": func(tb testing.TB, n int) []byte {
		return pack(tb, []any{1, same(n/15, "\x92\xacBlockRemoved\x90")})
	},
	"small events, then bad ones": func(tb testing.TB, n int) []byte {
		const good = 1000
		events := bytes.Repeat([]byte("\x92\xacBlockRemoved\x90"), good)
		return pack(tb, []any{1, list(good+n, append(events, bytes.Repeat([]byte{0x90}, n)...))})
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
		return pack(tb, batchOf([]any{"BlockRemoved", same(n, "\x00")}))
	},
	"lists of hashes that get longer": func(tb testing.TB, n int) []byte {
		var events []any
		for k := 1; k < n; k *= 2 {
			events = append(events, []any{"BlockRemoved", same(k/2+1, "\x00")})
		}
		return pack(tb, batchOf(events...))
	},
	"hashes that run out": func(tb testing.TB, n int) []byte {
		return pack(tb, []any{1, same(n/17, "\x92\xacBlockRemoved\xdc\x04\x00")})
	},
	"a hash that repeats": func(tb testing.TB, n int) []byte {
		return pack(tb, batchOf([]any{"BlockStored", same(n, "\x00"), nil, []any{}, 0}))
	},
	"hashes that differ": func(tb testing.TB, n int) []byte {
		return pack(tb, batchOf([]any{"BlockStored", distinct(n / 5), nil, []any{}, 0}))
	},
	"extra keys beyond the blocks": func(tb testing.TB, n int) []byte {
		keys := list(n, append(bytes.Repeat([]byte{0xc0}, n-1), 0x90))
		return pack(tb, batchOf([]any{"BlockStored", []any{1}, nil, []any{1}, 1, nil, nil, nil, keys}))
	},
	"extra keys of many blocks": func(tb testing.TB, n int) []byte {
		n /= 8
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

// TestBoundedMemory decodes and admits payloads that ask for much more than they
// are, each with a fresh Decoder and Rules. All that they allocate is counted, 40
// bytes for one of the payload at most; what is held at a time is less. Worst are
// events of 15 bytes, which take 344 each, and lists of identifiers of 3 bytes,
// which double as they grow.
func TestBoundedMemory(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	check := func(name string, payload []byte) {
		t.Helper()
		var (
			size          uint32
			counts        wire.Counts
			before, after runtime.MemStats
		)
		rules := wire.NewRules(&size)
		runtime.ReadMemStats(&before)
		var d wire.Decoder
		if b, err := d.Decode(payload); err == nil {
			rules.Admit(b, 0, &counts)
		}
		runtime.ReadMemStats(&after)
		if got, most := after.TotalAlloc-before.TotalAlloc, uint64(40*len(payload)+64<<10); got > most {
			t.Errorf("%s: %d bytes allocated for %d, want at most %d", name, got, len(payload), most)
		}
	}
	for _, v := range readVectors(t) {
		check(v.Name, v.payload)
	}
	for _, size := range []int{50_000, 1 << 20} {
		for name, payload := range greedy {
			check(name, payload(t, size))
		}
	}
}

// heap returns how many bytes are in use.
func heap() int {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// TestMemoryIsGivenBack decodes and admits a payload that takes much memory, then
// a small one, and looks at what stays. Events, hashes and the like stay up to a
// bound each; of the payload and its long strings nothing does.
func TestMemoryIsGivenBack(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	small := pack(t, batchOf(stored(obj{"medium": "GPU", "extra_keys": []any{[]any{"x"}}}, 1)))
	for name, payload := range greedy {
		t.Run(name, func(t *testing.T) {
			var (
				size   uint32
				counts wire.Counts
				d      wire.Decoder
			)
			rules := wire.NewRules(&size)
			take := func(payload []byte) {
				if b, err := d.Decode(payload); err == nil {
					rules.Admit(b, 0, &counts)
				}
			}
			take(small)
			before := heap()
			take(payload(t, 8<<20))
			took := heap() - before
			take(small)
			// The arenas that are below their bounds: 4 MiB of tokens at worst here.
			const most = 5 << 20
			if got := heap() - before; got > most {
				t.Errorf("%d bytes stay of %d, want at most %d", got, took, most)
			}
			runtime.KeepAlive(rules)
			runtime.KeepAlive(&d)
		})
	}
}

// TestOldEventsKeepNoPayload checks that the memory of events which a batch does
// not fill holds nothing of earlier payloads, be the batch smaller or bad.
func TestOldEventsKeepNoPayload(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	const payloads, size = 16, 1 << 20
	plain := pack(t, batchOf(removed(nil, 1)))
	for _, c := range []struct {
		name string
		last []byte
	}{
		{"a smaller batch", plain},
		{"a batch whose last event is bad", pack(t, batchOf(removed(nil, 1), []any{"BlockRemoved"}))},
		{"a batch cut off", plain[:len(plain)-1]},
		{"a batch that names its events twice", raw("\x82\xa6events\x92\x91\xb0AllBlocksCleared\x91\xb0AllBlocksCleared\xa6events\x90")},
	} {
		t.Run(c.name, func(t *testing.T) {
			var (
				size32 uint32
				counts wire.Counts
				d      wire.Decoder
			)
			rules := wire.NewRules(&size32)
			before := heap()
			// Each payload has one event more than the next, so that its last one is
			// the last to use its place.
			for k := payloads; k > 0; k-- {
				key := []any{[]any{[]byte(strings.Repeat("x", size))}}
				events := make([]any, k)
				for i := range events {
					events[i] = stored(nil, i)
				}
				events[k-1] = stored(obj{"extra_keys": key, "block_mm_infos": key, "mm_keys": key, "medium": "TAPE"}, 1)
				b, err := d.Decode(pack(t, batchOf(events...)))
				if err != nil {
					t.Fatal(err)
				}
				rules.Admit(b, 0, &counts)
			}
			_, _ = d.Decode(c.last)
			if got := heap() - before; got > size {
				t.Errorf("%d bytes stay", got)
			}
			runtime.KeepAlive(rules)
			runtime.KeepAlive(&d)
		})
	}
}

// TestRulesKeepNoPayload checks that a source that falls silent holds nothing of
// its last payload, nor the memory that it took.
func TestRulesKeepNoPayload(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	var (
		sizes  [16]uint32
		rules  []*wire.Rules
		counts wire.Counts
		d      wire.Decoder
	)
	for k := range sizes {
		rules = append(rules, wire.NewRules(&sizes[k]))
	}
	take := func(r *wire.Rules, payload []byte) {
		b, err := d.Decode(payload)
		if err != nil {
			t.Fatal(err)
		}
		r.Admit(b, 0, &counts)
	}
	small := pack(t, batchOf(removed(nil, 1)))
	var payloads [][]byte
	for _, name := range []string{"extra keys beyond the blocks", "extra keys of many blocks", "many extra keys of a block"} {
		payloads = append(payloads, greedy[name](t, 2<<20))
	}
	take(rules[0], small)
	before := heap()
	for _, r := range rules {
		for _, p := range payloads {
			take(r, p)
		}
		take(r, pack(t, batchOf(stored(obj{"extra_keys": []any{[]any{"dynamo-cache-salt:s", strings.Repeat("x", 2<<20)}}}, 1))))
	}
	take(wire.NewRules(new(uint32)), small)
	if got, most := heap()-before, len(rules)<<20; got > most {
		t.Errorf("%d bytes stay, want at most %d", got, most)
	}
	runtime.KeepAlive(rules)
	runtime.KeepAlive(payloads)
}

// TestSteadyStateAllocatesNothing decodes and admits B1 and B2 in both forms, with
// all that engines put into extra keys, and a step of 128 K tokens that evicts as
// much, each block in an event of its own.
func TestSteadyStateAllocatesNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	batches := make(map[string]*wire.Batch)
	for _, blocks := range []int{1, 16, 128} {
		for name, keys := range map[string]any{
			"no extra keys": nil,
			"a salt":        []any{"x", "dynamo-cache-salt:" + strings.Repeat("s", 100)},
			"an image":      []any{[]any{"image", 3}},
		} {
			b := store(blocks)
			ev := &b.Events[0]
			ev.LoRAName, ev.SpecKind = strings.Repeat("adapter", 146), "full_attention" // 1,022 bytes
			ev.GroupIdx, ev.HasGroupIdx = 0, true
			list := make([]any, blocks)
			for k := range list {
				list[k] = keys
			}
			ev.ExtraKeys = pack(t, list)
			batches[fmt.Sprintf("%d blocks, %s", blocks, name)] = b
		}
	}
	step := store(8192)
	for k := range 8192 {
		step.Events = append(step.Events, wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{uint64(k)}, Medium: "GPU"})
	}
	batches["a large step"] = step
	for name, batch := range batches {
		for form, formName := range formNames {
			e := wire.Encoder{BatchForm: form, EventForm: form}
			payload := e.AppendBatch(nil, batch)
			blocks := len(batch.Events[0].BlockHashes)
			var (
				d      wire.Decoder
				size   uint32
				counts wire.Counts
			)
			rules := wire.NewRules(&size)
			take := func() {
				b, err := d.Decode(payload)
				if err != nil {
					t.Fatal(err)
				}
				rules.Admit(b, 0, &counts)
				if len(b.Events) != len(batch.Events) || len(b.Events[0].TokensHashes) != blocks {
					t.Fatalf("%s: batch is %s", name, b.AppendJSON(nil))
				}
			}
			take()
			if allocs := testing.AllocsPerRun(20, take); allocs != 0 {
				t.Errorf("%s, %s: %v allocations, want 0", name, formName, allocs)
			}
		}
	}
}
