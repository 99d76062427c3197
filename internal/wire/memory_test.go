package wire_test

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
)

// perByte bounds the bytes that a fresh Decoder allocates per byte of payload, in addition
// to 64 KiB. The worst cases are bad events of one byte, which use 16 bytes each, and events
// of 15 bytes, which use 208 bytes, or 224 bytes if they may be skipped.
const perByte = 16

// TestDecodeTakesMemoryInProportion decodes payloads that claim to be much larger than they
// are, each with a fresh Decoder. All allocations count, including buffers replaced by
// larger ones.
func TestDecodeTakesMemoryInProportion(t *testing.T) {
	testclass.WithoutRace(t)
	check := func(name string, payload []byte) {
		t.Helper()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		var d wire.Decoder
		_, _ = d.Decode(payload)
		runtime.ReadMemStats(&after)
		if got, most := after.TotalAlloc-before.TotalAlloc, uint64(perByte*len(payload)+64<<10); got > most {
			t.Errorf("%s: %d bytes allocated for %d, want at most %d", name, got, len(payload), most)
		}
	}
	for _, v := range readVectors(t) {
		check(v.Name, v.payload)
	}
	for _, size := range []int{500, 2000, 8000, 30_000, 1 << 20} {
		for name, payload := range oversized {
			p := payload(t, size)
			check(name, p)
			check(name+", cut off", p[:len(p)-1])
		}
	}
}

// TestBoundedMemory decodes and admits payloads that claim to be much larger than they are,
// each with a fresh Decoder and Rules. All allocations count, at most 40 bytes per byte of
// payload. Fewer bytes are live at a time. The worst cases are events of 15 bytes, which use
// 208 bytes each, and lists of identifiers of 3 bytes, which double as they grow.
func TestBoundedMemory(t *testing.T) {
	testclass.WithoutRace(t)
	check := func(name string, payload []byte) {
		t.Helper()
		var (
			size          wire.BlockSize
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
		for name, payload := range oversized {
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

// TestMemoryOfALargeBatchIsFreed decodes and admits a large payload, then a small one, and
// measures the memory in use of both. Buffers of events, hashes and tokens are kept up to a bound
// each. The payload and its long strings are not kept.
func TestMemoryOfALargeBatchIsFreed(t *testing.T) {
	testclass.WithoutRace(t)
	small := pack(t, batchOf(stored(obj{"medium": "GPU", "extra_keys": []any{[]any{[]any{"x", 0}}}}, 1)))
	for name, payload := range oversized {
		t.Run(name, func(t *testing.T) {
			var (
				size   wire.BlockSize
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
			if took := heap() - before; took > 64<<20 {
				t.Errorf("%d bytes are in use, want at most 64 MiB", took)
			}
			take(small)
			// The largest buffer that is kept has 4 MiB of tokens.
			const most = 5 << 20
			if got := heap() - before; got > most {
				t.Errorf("%d bytes are still in use, want at most %d", got, most)
			}
			runtime.KeepAlive(rules)
			runtime.KeepAlive(&d)
		})
	}
}

// TestUnusedEventsReferenceNoPayload checks that unused event memory references no earlier
// payload, after a smaller batch and after an invalid one.
func TestUnusedEventsReferenceNoPayload(t *testing.T) {
	testclass.WithoutRace(t)
	const payloads, size = 16, 1 << 20
	plain := pack(t, batchOf(removed(nil, 1)))
	for _, c := range []struct {
		name string
		last []byte
	}{
		{"a smaller batch", plain},
		{"a batch whose last event is bad", pack(t, batchOf(removed(nil, 1), []any{"BlockRemoved"}))},
		{"a batch cut off", plain[:len(plain)-1]},
		{"a batch with two lists of events", raw("\x82\xa6events\x92\x91\xb0AllBlocksCleared\x91\xb0AllBlocksCleared\xa6events\x90")},
	} {
		t.Run(c.name, func(t *testing.T) {
			var (
				sized  wire.BlockSize
				counts wire.Counts
				d      wire.Decoder
			)
			rules := wire.NewRules(&sized)
			before := heap()
			// Each payload has one event more than the next, so that no later batch
			// overwrites its last event.
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
				t.Errorf("%d bytes are still in use", got)
			}
			runtime.KeepAlive(rules)
			runtime.KeepAlive(&d)
		})
	}
}

// TestIdleRulesReferenceNoPayload checks that the rules of an idle source retain neither its
// last payload nor the memory used for it.
func TestIdleRulesReferenceNoPayload(t *testing.T) {
	testclass.WithoutRace(t)
	var (
		sizes  [4]wire.BlockSize
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
		payloads = append(payloads, oversized[name](t, 2<<20))
	}
	take(rules[0], small)
	before := heap()
	for _, r := range rules {
		for _, p := range payloads {
			take(r, p)
		}
		take(r, pack(t, batchOf(stored(obj{"extra_keys": []any{[]any{"dynamo-cache-salt:s", strings.Repeat("x", 2<<20)}}}, 1))))
	}
	take(wire.NewRules(new(wire.BlockSize)), small)
	if got, most := heap()-before, len(rules)<<20; got > most {
		t.Errorf("%d bytes are still in use, want at most %d", got, most)
	}
	runtime.KeepAlive(rules)
	runtime.KeepAlive(payloads)
}

// TestSteadyStateAllocatesNothing decodes and admits B1 and B2 in both forms, with
// all kinds of extra keys, and a step that stores 128 K tokens and removes as many, with one
// block per event.
func TestSteadyStateAllocatesNothing(t *testing.T) {
	testclass.WithoutRace(t)
	batches := make(map[string]*wire.Batch)
	for _, blocks := range []int{1, 16, 128} {
		for name, keys := range map[string]any{
			"no extra keys": nil,
			"a salt":        []any{[]any{"image", 3}, "dynamo-cache-salt:" + strings.Repeat("s", 100)},
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
			ev.Raw = &wire.Raw{ExtraKeys: pack(t, list)}
			batches[fmt.Sprintf("%d blocks, %s", blocks, name)] = b
		}
	}
	step := store(8192)
	for k := range 8192 {
		step.Events = append(step.Events, wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{uint64(k)}, Medium: "GPU"})
	}
	batches["a large step"] = step
	counted := &wire.Batch{Events: slices.Clone(step.Events)}
	for k := range counted.Events[1:] {
		counted.Events[1+k].Rare = &wire.Rare{RemainingCopies: []uint32{uint32(k % 3)}}
	}
	batches["a large step that counts copies"] = counted
	for name, batch := range batches {
		for form, formName := range formNames {
			e := wire.Encoder{BatchForm: form, EventForm: form}
			if batch == counted {
				e.EventForm = wire.FormMap // arrays have no counts
			}
			payload := e.AppendBatch(nil, batch)
			blocks := len(batch.Events[0].BlockHashes)
			var (
				d      wire.Decoder
				size   = wire.BlockSize{Tokens: batch.Events[0].BlockSize}
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
