package enginegrpc_test

import (
	"bytes"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/tinylib/msgp/msgp"
	"github.com/zeebo/xxh3"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/enginegrpc"
	"github.com/kvcast/kvcast/internal/wire"
)

// decode converts a response, and returns the batch that the payload decodes to.
func decode(t *testing.T, protocol string, response message) wire.Batch {
	t.Helper()
	c, err := enginegrpc.Convert(protocol, response)
	if err != nil {
		t.Fatal(err)
	}
	b, err := new(wire.Decoder).Decode(c.Payload)
	if err != nil {
		t.Fatal(err)
	}
	return *b
}

func encoded(t *testing.T, v any) []byte {
	t.Helper()
	b, err := msgp.AppendIntf(nil, v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestConvertSMG(t *testing.T) {
	t.Parallel()
	key := func(field protowire.Number, text string) message { return message{}.text(field, text) }
	one := func(hash uint64, tokens ...uint32) wire.Event {
		return wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{hash}, Tokens: tokens, BlockSize: 2, Medium: "GPU"}
	}
	with := func(e wire.Event, change func(*wire.Event)) wire.Event {
		change(&e)
		return e
	}
	block := smgBlock(-5, 7, 8)
	stored := func(fields ...message) message {
		return message{}.message(2, bytes.Join(append(slicesOf(fields), message{}.message(1, block)), nil))
	}
	removed := func(fields ...message) message {
		return message{}.message(3, bytes.Join(append(slicesOf(fields), message{}.packed(1, -5, 6)), nil))
	}
	hash := uint64(math.MaxUint64 - 4)
	gone := wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{hash, 6}, Medium: "GPU"}
	for _, tt := range []struct {
		name  string
		event message
		want  []wire.Event
	}{
		{"store", stored(), []wire.Event{one(hash, 7, 8)}},
		{"parent", stored(message{}.number(2, -9)), []wire.Event{with(one(hash, 7, 8), func(e *wire.Event) { e.Parent, e.HasParent = math.MaxUint64-8, true })}},
		{"device", stored(message{}.number(3, 1).text(4, "gpu")), []wire.Event{one(hash, 7, 8)}},
		{"host", stored(message{}.number(3, 2).text(4, "CPU_PINNED")), []wire.Event{with(one(hash, 7, 8), func(e *wire.Event) { e.Medium = "CPU" })}},
		{"disk", stored(message{}.number(3, 3)), []wire.Event{with(one(hash, 7, 8), func(e *wire.Event) { e.Medium = "DISK" })}},
		{"external", stored(message{}.number(3, 4)), []wire.Event{with(one(hash, 7, 8), func(e *wire.Event) { e.Medium = "EXTERNAL" })}},
		{"unknown tier", stored(message{}.number(3, 9)), []wire.Event{with(one(hash, 7, 8), func(e *wire.Event) { e.Medium = "tier 9" })}},
		{"medium without a tier", stored(message{}.text(4, "NVME")), []wire.Event{with(one(hash, 7, 8), func(e *wire.Event) { e.Medium = "NVME" })}},
		{"cache level", message{}.message(2, message{}.message(1, append(block, message{}.number(5, 1)...))), []wire.Event{with(one(hash, 7, 8), func(e *wire.Event) { e.Medium = "CPU" })}},
		{"negative cache level", message{}.message(2, message{}.message(1, append(block, message{}.number(5, -1)...))), []wire.Event{with(one(hash, 7, 8), func(e *wire.Event) { e.Medium = "tier 0" })}},
		{"attention group", stored(message{}.number(5, 3).text(6, "sliding_window").number(7, 512)), []wire.Event{with(one(hash, 7, 8), func(e *wire.Event) {
			e.GroupIdx, e.HasGroupIdx, e.SpecKind = 3, true, "sliding_window"
			e.Rare = &wire.Rare{SlidingWindow: 512, HasSlidingWindow: true}
		})}},
		{"local", stored(message{}.number(8, 1)), []wire.Event{one(hash, 7, 8)}},
		{"remote", stored(message{}.number(8, 2)), []wire.Event{with(one(hash, 7, 8), func(e *wire.Event) { e.Rare = &wire.Rare{Locality: "REMOTE"} })}},
		{"ownership and session", stored(message{}.text(9, "kvcr").text(10, "s")), []wire.Event{with(one(hash, 7, 8), func(e *wire.Event) { e.Rare = &wire.Rare{Ownership: "kvcr", Note: "s"} })}},
		{"adapter and salt", stored(message{}.text(11, "lora").text(12, "salt")), []wire.Event{with(one(hash, 7, 8), func(e *wire.Event) { e.LoRAName, e.CacheSalt = "lora", "salt" })}},
		{"adapter id", message{}.message(2, message{}.message(1, append(block, message{}.number(4, -3)...))), []wire.Event{with(one(hash, 7, 8), func(e *wire.Event) { e.LoRAID, e.HasLoRAID = -3, true })}},
		{"unpacked tokens", message{}.message(2, message{}.message(1, message{}.number(1, 5).number(2, 1).number(2, 2).number(3, 2))), []wire.Event{one(5, 1, 2)}},
		{"several blocks", message{}.message(2, message{}.message(1, smgBlock(1, 1, 2)).message(1, smgBlock(2, 3, 4)).message(1, smgBlock(3, 5, 6))), []wire.Event{
			{Kind: wire.KindStored, BlockHashes: []uint64{1, 2, 3}, Tokens: []uint32{1, 2, 3, 4, 5, 6}, BlockSize: 2, Medium: "GPU"},
		}},
		{"extra keys of the second block", message{}.message(2, message{}.message(1, smgBlock(1, 1, 2)).
			message(1, smgBlock(2, 3, 4).message(6, key(1, "t")).message(6, key(2, "\xff")).message(6, message{}.number(3, -2)).message(6, message{}.message(4, message{}.text(1, "image").number(2, 9)))).
			message(1, smgBlock(3, 5, 6))), []wire.Event{
			{
				Kind: wire.KindStored, BlockHashes: []uint64{1, 2, 3}, Tokens: []uint32{1, 2, 3, 4, 5, 6}, BlockSize: 2, Medium: "GPU",
				Raw: &wire.Raw{ExtraKeys: encoded(t, []any{nil, []any{"t", []byte{0xff}, int64(-2), []any{"image", int64(9)}}, nil})},
			},
		}},
		{"blocks of other sizes", message{}.message(2, message{}.number(2, 9).message(1, smgBlock(1, 1, 2)).message(1, message{}.number(1, 2).packed(2, 3).number(3, 1)).message(1, smgBlock(3, 5, 6))), []wire.Event{
			with(one(1, 1, 2), func(e *wire.Event) { e.Parent, e.HasParent = 9, true }),
			{Kind: wire.KindStored, BlockHashes: []uint64{2}, Tokens: []uint32{3}, BlockSize: 1, Medium: "GPU", Parent: 1, HasParent: true},
			with(one(3, 5, 6), func(e *wire.Event) { e.Parent, e.HasParent = 2, true }),
		}},
		{"a block with too many tokens", message{}.message(2, message{}.message(1, smgBlock(1, 1, 2)).message(1, smgBlock(2, 3, 4, 9)).message(1, smgBlock(3, 5, 6))), []wire.Event{
			one(1, 1, 2),
			{Kind: wire.KindStored, BlockHashes: []uint64{2}, BlockSize: 2, Medium: "GPU", Parent: 1, HasParent: true},
			with(one(3, 5, 6), func(e *wire.Event) { e.Parent, e.HasParent = 2, true }),
		}},
		{"blocks without tokens", message{}.message(2, message{}.number(3, 2).message(1, message{}.number(1, 1).number(3, 2)).message(1, message{}.number(1, 2).number(3, 2))), []wire.Event{
			{Kind: wire.KindStored, BlockHashes: []uint64{1, 2}, Medium: "CPU"},
		}},
		{"store of nothing", message{}.message(2, nil), nil},
		{"remove", removed(), []wire.Event{gone}},
		{"remove by cache level", removed(message{}.number(2, 1)), []wire.Event{with(gone, func(e *wire.Event) { e.Medium = "CPU" })}},
		{"remove by tier", removed(message{}.number(2, 1).number(3, 3)), []wire.Event{with(gone, func(e *wire.Event) { e.Medium = "DISK" })}},
		{"remove by medium", removed(message{}.text(4, "FS")), []wire.Event{with(gone, func(e *wire.Event) { e.Medium = "FS" })}},
		{"remove of others", removed(message{}.number(5, 0).number(6, 2).text(7, "o")), []wire.Event{with(gone, func(e *wire.Event) {
			e.HasGroupIdx, e.Rare = true, &wire.Rare{Locality: "REMOTE", Ownership: "o"}
		})}},
		{"clear", message{}.message(4, nil), []wire.Event{{Kind: wire.KindCleared}}},
		{"clear of others", message{}.message(4, message{}.text(1, "o")), []wire.Event{{Kind: wire.KindCleared, Rare: &wire.Rare{Ownership: "o"}}}},
		{"unknown event", message{}.message(99, nil), nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := decode(t, config.TransportSMG, message{}.number(1, 3).double(2, 1.5).message(3, tt.event).number(4, 7))
			want := wire.Batch{Form: wire.FormArray, Time: 1.5, HasTime: true, Rank: 7, HasRank: true, Events: tt.want}
			compare(t, want, got)
		})
	}
}

// slicesOf returns the messages as slices of bytes.
func slicesOf(all []message) (bytes [][]byte) {
	for _, m := range all {
		bytes = append(bytes, m)
	}
	return bytes
}

func compare(t *testing.T, want, got wire.Batch) {
	t.Helper()
	if d := cmp.Diff(want, got, cmpopts.EquateEmpty(), cmpopts.IgnoreFields(wire.Event{}, "Index")); d != "" {
		t.Errorf("batch (-want +got):\n%s", d)
	}
}

// The first batch of a snapshot clears all blocks, also if the server does not say so, or clears those of another owner alone.
func TestSnapshots(t *testing.T) {
	t.Parallel()
	clears := message{}.message(3, message{}.message(4, nil))
	clearsOther := message{}.message(3, message{}.message(4, message{}.text(1, "another")))
	for _, tt := range []struct {
		name  string
		index int64
		first message
		want  []wire.Kind // that the rules admit
	}{
		{"clear", 0, clears, []wire.Kind{wire.KindCleared, wire.KindStored}},
		{"no clear", 0, nil, []wire.Kind{wire.KindCleared, wire.KindStored}},
		{"clear of another owner", 0, clearsOther, []wire.Kind{wire.KindCleared, wire.KindStored}},
		{"not the first batch", 1, nil, []wire.Kind{wire.KindStored}},
	} {
		m := append(slices.Clone(tt.first), smgStored(0, 3)...).message(7, message{}.number(1, tt.index).number(2, 2).number(3, 1))
		b := decode(t, config.TransportSMG, m)
		wire.NewRules(new(wire.BlockSize)).Admit(&b, b.Rank, new(wire.Counts))
		var got []wire.Kind
		for _, e := range b.Events {
			got = append(got, e.Kind)
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: got %v, want %v", tt.name, got, tt.want)
		}
	}
}

// TestTooMany has batches that would take many times their size.
func TestTooMany(t *testing.T) {
	t.Parallel()
	many := func(field protowire.Number, n int) (all message) {
		for range n {
			all = all.message(field, nil)
		}
		return all
	}
	stored := func(blocks message) message { return message{}.number(1, 7).message(3, message{}.message(2, blocks)) }
	for name, m := range map[string]message{
		"blocks":     stored(many(1, 1<<20+1)),
		"extra keys": stored(message{}.message(1, many(6, 1<<17+1))),
		"tokens":     stored(message{}.message(1, message{}.message(2, make([]byte, 1<<22+1)))),
		"removes":    message{}.number(1, 7).message(3, message{}.message(3, message{}.message(1, make([]byte, 1<<20+1)))),
	} {
		if _, err := enginegrpc.Convert(config.TransportSMG, m); err == nil || !strings.Contains(err.Error(), "more than 1048576 blocks, 4194304 tokens or 131072 extra keys") {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestConvertOpenEngine(t *testing.T) {
	t.Parallel()
	hash := openHash("int64", "\x01\x02")
	store := func(fields ...message) message {
		return message{}.message(10, bytes.Join(append([][]byte{message{}.message(1, hash).packed(3, 7, 8).number(4, 2)}, slicesOf(fields)...), nil))
	}
	one := func(change func(*wire.Event)) []wire.Event {
		e := wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{0x102}, Tokens: []uint32{7, 8}, BlockSize: 2}
		if change != nil {
			change(&e)
		}
		return []wire.Event{e}
	}
	remove := func(fields ...message) message {
		return message{}.message(11, bytes.Join(append([][]byte{message{}.message(1, hash)}, slicesOf(fields)...), nil))
	}
	gone := func(change func(*wire.Event)) []wire.Event {
		e := wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{0x102}, HasGroupIdx: true}
		if change != nil {
			change(&e)
		}
		return []wire.Event{e}
	}
	tuple := func(values ...string) message {
		var m message
		for _, v := range values {
			m = m.text(1, v)
		}
		return message{}.message(20, m)
	}
	for _, tt := range []struct {
		name  string
		event message
		want  []wire.Event
	}{
		{"store", store(), one(nil)},
		{"parent", store(message{}.message(2, openHash("decimal_int64", "-1"))), one(func(e *wire.Event) { e.Parent, e.HasParent = math.MaxUint64, true })},
		{"adapter", store(message{}.number(5, 4).text(6, "lora")), one(func(e *wire.Event) { e.LoRAID, e.HasLoRAID, e.LoRAName = 4, true, "lora" })},
		{"device", store(message{}.number(7, 1)), one(func(e *wire.Event) { e.Medium = "GPU" })},
		{"host", store(message{}.number(7, 2)), one(func(e *wire.Event) { e.Medium = "CPU_PINNED" })},
		{"disk", store(message{}.number(7, 3)), one(func(e *wire.Event) { e.Medium = "DISK" })},
		{"external", store(message{}.number(7, 4)), one(func(e *wire.Event) { e.Medium = "EXTERNAL" })},
		{"unknown medium", store(message{}.number(7, 5)), one(func(e *wire.Event) { e.Medium = "medium 5" })},
		{"attention group", store(message{}.number(21, 0).text(22, "mla_attention").number(23, 64)), one(func(e *wire.Event) {
			e.SpecKind, e.HasGroupIdx, e.Rare = "mla_attention", true, &wire.Rare{SlidingWindow: 64, HasSlidingWindow: true}
		})},
		{"the only group", store(message{}.number(21, 1)), one(func(e *wire.Event) { e.SpecKind, e.GroupIdx, e.HasGroupIdx = "full_attention", 1, true })},
		{"extra keys", store(tuple("a", "b"), tuple("too many")), one(func(e *wire.Event) { e.Raw = &wire.Raw{ExtraKeys: encoded(t, []any{[]any{"a", "b"}})} })},
		{"multimodal keys", store(tuple("trt_mm_v1", "0", "42", "99"), tuple("trt_mm_v1", "0", "43", "99"), tuple("trt_mm_v1", "1", "44", "99")),
			one(func(e *wire.Event) {
				e.Raw = &wire.Raw{BlockMMInfos: encoded(t, []any{[]any{[]any{[]any{uint64(42)}, []any{uint64(43)}}}})}
			})},
		{"without tokens", message{}.message(10, message{}.message(1, hash).number(4, 16).number(7, 2)), []wire.Event{{Kind: wire.KindStored, BlockHashes: []uint64{0x102}, Medium: "CPU_PINNED"}}},
		{"remove", remove(), gone(nil)},
		{"remove of others", remove(message{}.number(2, 3).number(3, 2)), gone(func(e *wire.Event) { e.Medium, e.GroupIdx = "DISK", 2 })},
		{"clear", message{}.text(1, "request").message(12, nil), []wire.Event{{Kind: wire.KindCleared}}},
		{"unknown event", message{}.message(13, nil), nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := decode(t, config.TransportOpenEngine, openBatch(3, 5, tt.event))
			compare(t, wire.Batch{Form: wire.FormArray, Time: 1_800_000_005, HasTime: true, Rank: 3, HasRank: true, Events: tt.want}, got)
		})
	}
}

func TestOpenEngineHashes(t *testing.T) {
	t.Parallel()
	digest := strings.Repeat("x", 24) + "\x80\x00\x00\x00\x00\x00\x00\x01"
	for _, tt := range []struct {
		encoding, value string
		want            uint64
	}{
		{"int64", "\xff\xff\xff\xff\xff\xff\xff\xfe", math.MaxUint64 - 1},
		{"int64", "\x05", 5},
		{"bytes", digest, 1<<63 + 1},
		{"bytes", "", 0},
		{"decimal_int64", "-2", math.MaxUint64 - 1},
		{"decimal_int64", "18446744073709551615", math.MaxUint64},
		{"string", "77", 77},
		{"string", "abc", xxh3.HashString("abc")},
		{"engine_specific", digest, xxh3.HashString(digest)},
	} {
		removed := message{}.message(11, message{}.message(1, openHash(tt.encoding, tt.value)))
		if got := decode(t, config.TransportOpenEngine, openBatch(0, 1, removed)).Events[0].BlockHashes[0]; got != tt.want {
			t.Errorf("%s %q is %d, want %d", tt.encoding, tt.value, got, tt.want)
		}
	}
}

func TestResponsesWithoutABatch(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		protocol string
		response message
	}{
		"load alone":        {config.TransportSMG, message{}.number(1, 5).message(8, message{}.number(9, 1))},
		"nothing":           {config.TransportOpenEngine, nil},
		"an unknown answer": {config.TransportOpenEngine, message{}.message(9, nil)},
	} {
		if c, err := enginegrpc.Convert(tt.protocol, tt.response); err != nil || !c.Ignored {
			t.Errorf("%s: ignored %v, error %v", name, c.Ignored, err)
		}
	}
	if c, err := enginegrpc.Convert(config.TransportSMG, message{}.number(1, 5).message(8, message{}.number(1, 3))); err != nil || c.Ignored {
		t.Errorf("batch with load: ignored %v, error %v", c.Ignored, err)
	}
	_, err := enginegrpc.Convert(config.TransportOpenEngine, message{}.message(2, message{}.number(1, 12).text(2, "out of memory")))
	if want := "the engine ended the call: error code 12: out of memory"; err == nil || err.Error() != want {
		t.Errorf("error %v, want %q", err, want)
	}
}

// A batch that cannot be converted keeps its seq, and its payload differs from that of another such batch.
func TestBatchThatCannotBeConverted(t *testing.T) {
	t.Parallel()
	events := message(bytes.Repeat(message{}.message(3, message{}.message(4, nil)), 1<<17+1))
	tokens := make([]int64, 0, 1<<20)
	for range cap(tokens) {
		tokens = append(tokens, math.MaxUint32)
	}
	large := message{}.message(1, message{}.number(1, 1).packed(2, tokens[:1<<20]...).number(3, 1<<20))
	for name, m := range map[string]message{
		"truncated event":    message{}.text(3, "\x12\x05"),
		"truncated tokens":   message{}.message(3, message{}.message(2, message{}.message(1, message{}.text(2, "\x80")))),
		"truncated hashes":   message{}.message(3, message{}.message(3, message{}.text(1, "\x80"))),
		"a string not UTF-8": message{}.message(3, message{}.message(2, message{}.message(1, smgBlock(1, 1, 2)).text(4, "\xff"))),
		"a key not UTF-8":    message{}.message(3, message{}.message(2, message{}.message(1, smgBlock(1, 1, 2).message(6, message{}.text(1, "\xff"))))),
		"infinite time":      message{}.double(2, math.Inf(1)),
		"no time":            message{}.double(2, math.NaN()),
		"time in ms":         message{}.double(2, 1.7e12),
		"too many events":    events,
		"too long":           message{}.message(3, message{}.message(2, append(large, large...))),
	} {
		t.Run(name, func(t *testing.T) {
			first, err := enginegrpc.Convert(config.TransportSMG, append(message{}.number(1, 4).number(4, 2), m...))
			if err == nil || first.Seq != 4 || first.Rank != 2 {
				t.Fatalf("seq %d, rank %d, error %v", first.Seq, first.Rank, err)
			}
			other, _ := enginegrpc.Convert(config.TransportSMG, append(message{}.number(1, 5).number(4, 2), m...))
			if bytes.Equal(first.Payload, other.Payload) {
				t.Error("another batch has the same payload")
			}
			if _, err := new(wire.Decoder).Decode(first.Payload); err == nil || len(first.Payload) > transport.MaxPayloadBytes {
				t.Errorf("a payload of %d bytes decodes with error %v", len(first.Payload), err)
			}
		})
	}
}

// FuzzConvert checks that every response is refused, or leads to a payload that decodes, and that the payload does not depend on the
// responses before.
func FuzzConvert(f *testing.F) {
	f.Add(true, []byte(smgStored(1, 2)))
	f.Add(false, []byte(openBatch(0, 1, message{}.message(10, message{}.message(1, openHash("string", "1")).packed(3, 1, 2).number(4, 2)))))
	f.Fuzz(func(t *testing.T, isSMG bool, response []byte) {
		protocol := config.TransportOpenEngine
		if isSMG {
			protocol = config.TransportSMG
		}
		convert := enginegrpc.NewConverter(protocol)
		c, err := convert(response)
		if again, _ := convert(response); !bytes.Equal(again.Payload, c.Payload) {
			t.Error("the same response has another payload")
		}
		if err != nil || c.Ignored {
			return
		}
		b, err := new(wire.Decoder).Decode(c.Payload)
		if err != nil || b.Rank != c.Rank || len(b.Skipped) > 0 {
			t.Errorf("decoded with rank %d, %d events skipped, error %v; want rank %d", b.Rank, len(b.Skipped), err, c.Rank)
		}
	})
}

// BenchmarkConvert converts a batch of SMG's that stores 16 blocks of 16 tokens.
func BenchmarkConvert(b *testing.B) {
	var stored message
	for hash := range int64(16) {
		tokens := make([]int64, 16)
		for i := range tokens {
			tokens[i] = 1000*hash + int64(i)
		}
		stored = stored.message(1, message{}.number(1, -hash*1e15).packed(2, tokens...).number(3, 16))
	}
	response := message{}.number(1, 7).double(2, 1.8e9).message(3, message{}.message(2, stored.number(3, 1)))
	convert := enginegrpc.NewConverter(config.TransportSMG)
	b.SetBytes(int64(len(response)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := convert(response); err != nil {
			b.Fatal(err)
		}
	}
}
