package wire_test

import (
	"bytes"
	"math"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/tinylib/msgp/msgp"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
)

var publisherID = []byte("0123456789abcdef")

// TestPublisherID decodes batches with a publisher id, and batches with another value instead,
// which is an unknown extra element.
func TestPublisherID(t *testing.T) {
	for _, c := range []struct {
		name string
		id   any
		want []byte
	}{
		{"16 bytes", publisherID, publisherID},
		{"a 16-bit length", raw("\xc5\x00\x10" + string(publisherID)), publisherID},
		{"a 32-bit length", raw("\xc6\x00\x00\x00\x10" + string(publisherID)), publisherID},
		{"nil", nil, nil},
		{"no bytes", []byte{}, nil},
		{"15 bytes", publisherID[:15], nil},
		{"17 bytes", append(publisherID[:16:16], 1), nil},
		{"a string", string(publisherID), nil},
		{"an integer", 7, nil},
		{"a list", []any{publisherID}, nil},
		{"a map", obj{"publisher_id": publisherID}, nil},
		{"an extension of 16 bytes", raw("\xd8\x01" + string(publisherID)), nil},
	} {
		for _, batch := range []any{
			[]any{1.5, []any{cleared}, 3, c.id},
			[]any{1.5, []any{cleared}, 3, c.id, publisherID, obj{"x": []any{1}}},
			obj{"ts": 1.5, "events": []any{cleared}, "data_parallel_rank": 3, "publisher_id": c.id},
		} {
			b, err := new(wire.Decoder).Decode(pack(t, batch))
			if err != nil {
				t.Errorf("%s: %v: %v", c.name, batch, err)
				continue
			}
			if !bytes.Equal(b.PublisherID, c.want) || (b.PublisherID == nil) != (c.want == nil) || !b.HasRank || b.Rank != 3 || len(b.Events) != 1 {
				t.Errorf("%s: %v: got %+v, want publisher %q", c.name, batch, b, c.want)
			}
		}
	}
}

// TestPublisherIDIsAView checks that the id is a view of the payload, and is reset by the
// next batch.
func TestPublisherIDIsAView(t *testing.T) {
	var d wire.Decoder
	payload := pack(t, []any{1.5, []any{}, nil, publisherID})
	b, err := d.Decode(payload)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := unsafe.SliceData(b.PublisherID), &payload[len(payload)-16]; got != want || cap(b.PublisherID) != 16 {
		t.Errorf("id of capacity %d at %p, want 16 at %p", cap(b.PublisherID), got, want)
	}
	if b, err = d.Decode(pack(t, batchOf())); err != nil || b.PublisherID != nil {
		t.Errorf("next batch: publisher %q, error %v", b.PublisherID, err)
	}
}

// TestHeartbeat checks that a batch without events is valid.
func TestHeartbeat(t *testing.T) {
	for _, batch := range []any{
		[]any{1.5, []any{}, 2, publisherID},
		obj{"ts": 1.5, "events": []any{}, "data_parallel_rank": 2, "publisher_id": publisherID},
	} {
		b, err := new(wire.Decoder).Decode(pack(t, batch))
		if err != nil {
			t.Fatal(err)
		}
		if len(b.Events) != 0 || len(b.Skipped) != 0 || b.Rank != 2 || !bytes.Equal(b.PublisherID, publisherID) {
			t.Errorf("%v: got %+v", batch, b)
		}
	}
}

// TestTruncatedPublisherID truncates the batch within the id.
func TestTruncatedPublisherID(t *testing.T) {
	payload := pack(t, []any{1.5, []any{}, nil, publisherID})
	for n := range payload {
		if b, err := new(wire.Decoder).Decode(payload[:n]); err == nil {
			t.Errorf("%d of %d bytes decode to %+v", n, len(payload), b)
		}
	}
}

// TestOrigin checks the origin of a store's blocks.
func TestOrigin(t *testing.T) {
	for _, c := range []struct {
		origin any
		want   wire.Origin
	}{
		{"NEW", wire.OriginNew},
		{"REUSED", wire.OriginReused},
		{raw("\xd9\x03NEW"), wire.OriginNew},
		{nil, wire.OriginUnknown},
		{"", wire.OriginUnknown},
		{"new", wire.OriginUnknown},
		{"RESTORED", wire.OriginUnknown},
		{raw("\xa3\xff\xfe\xfd"), wire.OriginUnknown},
		{1, wire.OriginUnknown},
		{true, wire.OriginUnknown},
		{[]byte("NEW"), wire.OriginUnknown},
		{[]any{"NEW"}, wire.OriginUnknown},
		{obj{"NEW": []any{1}}, wire.OriginUnknown},
	} {
		// Before the type, and after it.
		for _, ev := range []raw{
			append(append(raw("\x85\xa6origin"), pack(t, c.origin)...), "\xa4type\xabBlockStored\xacblock_hashes\x91\x05\xa9token_ids\x91\x07\xaablock_size\x01"...),
			append(raw("\x85\xa4type\xabBlockStored\xacblock_hashes\x91\x05\xa9token_ids\x91\x07\xaablock_size\x01\xa6origin"), pack(t, c.origin)...),
		} {
			want := &wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{5}, Tokens: []uint32{7}, BlockSize: 1, Origin: c.want}
			if diff := cmp.Diff(want, oneEvent(t, ev)); diff != "" {
				t.Errorf("%v: event differs (-want +got):\n%s", c.origin, diff)
			}
		}
	}
	twice := raw("\x86\xa4type\xabBlockStored\xacblock_hashes\x91\x05\xa9token_ids\x91\x07\xaablock_size\x01\xa6origin\xa3NEW\xa6origin\xa1x")
	if got := oneEvent(t, twice); got == nil || got.Origin != wire.OriginUnknown {
		t.Errorf("two origins, the second unknown: %+v", got)
	}
	for _, name := range []string{"BlockRemoved", "AllBlocksCleared"} {
		if got := oneEvent(t, obj{"type": name, "block_hashes": []any{5}, "origin": "REUSED"}); got == nil || got.Origin != wire.OriginUnknown {
			t.Errorf("%s with an origin: %+v", name, got)
		}
	}
}

// TestRemainingCopies checks a remove's numbers of remaining copies: one per hash, or none
// at all.
func TestRemainingCopies(t *testing.T) {
	for _, c := range []struct {
		name           string
		hashes, counts any
		want           []uint32
	}{
		{"one a hash", []any{5, 6, 7}, []any{0, 1, uint64(math.MaxUint32)}, []uint32{0, 1, math.MaxUint32}},
		{"signed codes", []any{5, 6}, raw("\x92\xd0\x02\xd3\x00\x00\x00\x00\x00\x00\x00\x03"), []uint32{2, 3}},
		{"nil", []any{5}, nil, nil},
		{"none for no hash", []any{}, []any{}, nil},
		{"fewer than hashes", []any{5, 6}, []any{1}, nil},
		{"more than hashes", []any{5}, []any{1, 2}, nil},
		{"a number", []any{5}, 1, nil},
		{"a string", []any{5}, "1", nil},
		{"bytes", []any{5}, []byte{1}, nil},
		{"a map", []any{5}, obj{"5": 1}, nil},
		{"a nil among them", []any{5, 6}, []any{1, nil}, nil},
		{"a negative one", []any{5, 6}, []any{1, -1}, nil},
		{"one above 32 bits", []any{5}, []any{uint64(1) << 32}, nil},
		{"a float", []any{5}, []any{1.0}, nil},
		{"lists", []any{5}, []any{[]any{1}}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			hashes, counts := pack(t, c.hashes), pack(t, c.counts)
			for _, ev := range []string{
				"\x83\xa4type\xacBlockRemoved\xacblock_hashes" + string(hashes) + "\xb5remaining_copy_counts" + string(counts),
				"\x83\xb5remaining_copy_counts" + string(counts) + "\xacblock_hashes" + string(hashes) + "\xa4type\xacBlockRemoved",
				"\x83\xb5remaining_copy_counts" + string(counts) + "\xaaseq_hashes" + string(hashes) + "\xaaevent_type\xa7removed",
			} {
				got := oneEvent(t, raw(ev))
				if got == nil || got.Kind != wire.KindRemoved {
					t.Fatalf("%q: event %+v", ev, got)
				}
				var copies []uint32
				if got.Rare != nil {
					copies = got.Rare.RemainingCopies
				}
				if diff := cmp.Diff(c.want, copies); diff != "" || (got.Rare == nil) != (c.want == nil) {
					t.Errorf("%q: rare fields %+v, copies differ (-want +got):\n%s", ev, got.Rare, diff)
				}
			}
		})
	}
	t.Run("on other kinds of events", func(t *testing.T) {
		for _, more := range []obj{
			{"type": "BlockStored", "token_ids": []any{1}, "block_size": 1, "parent_block_hash": 4, "medium": "GPU", "origin": "NEW"},
			{"type": "AllBlocksCleared"},
		} {
			want := oneEvent(t, withHash(more, nil))
			if diff := cmp.Diff(want, oneEvent(t, withHash(more, []any{1}))); diff != "" {
				t.Errorf("%v: event differs (-without +with):\n%s", more, diff)
			}
		}
	})
	t.Run("two lists of counts", func(t *testing.T) {
		for counts, want := range map[string]bool{"\x91\x02": true, "\x90": false, "\xa0": false} {
			ev := "\x84\xa4type\xacBlockRemoved\xacblock_hashes\x91\x05\xb5remaining_copy_counts\x91\x01\xb5remaining_copy_counts" + counts
			got := oneEvent(t, raw(ev))
			if got == nil || (got.Rare != nil) != want || want && got.Rare.RemainingCopies[0] != 2 {
				t.Errorf("%q: event %+v", ev, got)
			}
		}
	})
}

func withHash(ev obj, counts any) obj {
	whole := obj{"block_hashes": []any{5}, "remaining_copy_counts": counts}
	for k, v := range ev {
		whole[k] = v
	}
	return whole
}

// TestLookaheadTokensAreSkipped checks that vLLM's list for each hash is skipped, and the
// fields after it are read.
func TestLookaheadTokensAreSkipped(t *testing.T) {
	for _, lookahead := range []any{[]any{}, []any{1, 2}, []any{[]any{1}, nil}, nil, "x"} {
		got := oneEvent(t, stored(obj{"lookahead_token_ids": lookahead, "medium": "GPU", "parent_block_hash": 4}, 5))
		want := oneEvent(t, stored(obj{"medium": "GPU", "parent_block_hash": 4}, 5))
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%v: event differs (-want +got):\n%s", lookahead, diff)
		}
	}
}

// tails are elements that a later version may add to an array event.
var tails = []any{nil, true, 7, -7, uint64(math.MaxUint64), 2.5, "x", raw("\xa1\xff"), []byte{1}, []any{}, []any{nil, []any{1}}, obj{}, obj{"x": []any{1, obj{"y": nil}}},
	raw("\xd6\xff\x00\x00\x00\x01")}

// TestUnknownElementsAreSkipped appends elements of all types after the last known one of
// each array event: the event does not change.
func TestUnknownElementsAreSkipped(t *testing.T) {
	testclass.WithoutRace(t)
	store := func(tail ...any) []any {
		return append([]any{"BlockStored", []any{5, 6}, 4, []any{1, 2}, 1, 3, "CPU"}, tail...)
	}
	for name, known := range map[string][]any{
		"vLLM":                       store("adapter", []any{nil, []any{"x"}}, 2, "full_attention", 128),
		"vLLM, no window":            store("adapter", nil, 2, "full_attention", nil),
		"vLLM, group alone":          store(nil, nil, 2, nil, nil),
		"vLLM, kind alone":           store(nil, nil, nil, "full_attention", nil),
		"vLLM, window alone":         store(nil, nil, nil, nil, 128),
		"Dynamo":                     store("adapter", nil, []any{nil}, 2, "full_attention", 128),
		"Dynamo, nil after mm infos": store("adapter", nil, []any{nil}, nil, nil, nil),
		"Dynamo, no mm infos":        store("adapter", nil, nil, 2, "full_attention", 128),
		"Dynamo, all but the group":  store("adapter", nil, []any{nil}, nil, "full_attention", 128),
		"SGLang":                     store(obj{"cache_salt": "s", "session_id": "t"}),
		"SGLang, nothing set":        store(obj{}),
		"remove":                     {"BlockRemoved", []any{5, 6}, "CPU", 1},
		"remove, nothing set":        {"BlockRemoved", []any{5, 6}, nil, nil},
		"clear":                      {"AllBlocksCleared"},
	} {
		want := oneEvent(t, known)
		if want == nil {
			t.Fatalf("%s: no event", name)
		}
		for _, first := range tails {
			for _, second := range tails {
				for _, more := range [][]any{{first}, {first, second}, {nil, first, second}} {
					ev := slices.Concat(known, more)
					if diff := cmp.Diff(want, oneEvent(t, ev)); diff != "" {
						t.Errorf("%s, then %v: event differs (-want +got):\n%s", name, more, diff)
					}
				}
			}
		}
	}
	// The producer is unknown: an integer may be a window, but no value makes the event bad.
	unset := store("adapter", nil, nil, nil, nil)
	for _, first := range tails {
		for _, second := range tails {
			got := oneEvent(t, append(unset[:len(unset):len(unset)], first, second))
			if diff := cmp.Diff(oneEvent(t, unset), got, cmpopts.IgnoreFields(wire.Event{}, "Rare")); diff != "" {
				t.Errorf("nothing set, then %v, %v: event differs (-want +got):\n%s", first, second, diff)
			}
		}
	}
}

// TestEventStaysSmall bounds the size of Event, because a batch may have many events.
func TestEventStaysSmall(t *testing.T) {
	if got := unsafe.Sizeof(wire.Event{}); got > 208 {
		t.Errorf("an event takes %d bytes, want 208 at most", got)
	}
}

// TestNewerFieldsAsJSON checks that JSON has newer fields only if they are set.
func TestNewerFieldsAsJSON(t *testing.T) {
	b := &wire.Batch{Form: wire.FormArray, PublisherID: []byte("\x00\x01\xfe\xff456789abcdef"), Events: []wire.Event{
		{Kind: wire.KindStored, BlockHashes: []uint64{5}, Tokens: []uint32{1}, BlockSize: 1, Origin: wire.OriginReused},
		{Kind: wire.KindRemoved, BlockHashes: []uint64{5, 6}, Rare: &wire.Rare{RemainingCopies: []uint32{0, 3}}},
	}}
	want := `{"ts":null,"dp_rank":null,"publisher_id":"0001feff343536373839616263646566","form":"array","events":[` +
		`{"kind":"stored","block_hashes":["5"],"parent":null,"token_ids":[1],"block_size":1,"origin":"REUSED"},` +
		`{"kind":"removed","block_hashes":["5","6"],"remaining_copy_counts":[0,3]}]}`
	if got := string(b.AppendJSON(nil)); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	b.PublisherID, b.Events[0].Origin, b.Events[1].Rare = nil, wire.OriginUnknown, nil
	if got := string(b.AppendJSON(nil)); strings.Contains(got, "publisher") || strings.Contains(got, "origin") || strings.Contains(got, "copy") {
		t.Errorf("JSON has absent fields: %s", got)
	}
}

// TestEncodeNewerFields compares encoded batches with the batches of engines.
func TestEncodeNewerFields(t *testing.T) {
	b := &wire.Batch{Time: 1.5, HasTime: true, PublisherID: publisherID, Events: []wire.Event{
		{Kind: wire.KindStored, BlockHashes: []uint64{5}, Tokens: []uint32{1}, BlockSize: 1, Medium: "GPU", Origin: wire.OriginNew},
		{Kind: wire.KindRemoved, BlockHashes: []uint64{5}, Medium: "GPU", Rare: &wire.Rare{RemainingCopies: []uint32{2}}},
	}}
	events := []any{
		map[string]any{"type": "BlockStored", "block_hashes": []any{int64(5)}, "parent_block_hash": nil, "token_ids": []any{int64(1)},
			"block_size": int64(1), "lora_id": nil, "medium": "GPU", "lora_name": nil, "origin": "NEW"},
		map[string]any{"type": "BlockRemoved", "block_hashes": []any{int64(5)}, "medium": "GPU", "remaining_copy_counts": []any{int64(2)}},
	}
	for form, want := range map[wire.Form]any{
		wire.FormArray: []any{1.5, events, nil, publisherID},
		wire.FormMap:   map[string]any{"ts": 1.5, "events": events, "publisher_id": publisherID},
	} {
		e := wire.Encoder{BatchForm: form, EventForm: wire.FormMap}
		got, left, err := msgp.ReadIntfBytes(e.AppendBatch(nil, b))
		if err != nil || len(left) != 0 {
			t.Fatalf("%d bytes left, error %v", len(left), err)
		}
		if diff := cmp.Diff(want, got, cmp.FilterValues(bothInts, cmp.Comparer(sameInt))); diff != "" {
			t.Errorf("batch differs (-want +got):\n%s", diff)
		}
	}
}
