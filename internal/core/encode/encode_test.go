package encode_test

import (
	"bytes"
	"encoding/hex"
	"math"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/encode"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// drawVarint draws numbers of each encoded length.
func drawVarint(t *rapid.T, label string, bits int) uint64 {
	edges := []uint64{0, 1, math.MaxUint64}
	for shift := 7; shift < bits; shift += 7 {
		edges = append(edges, 1<<shift-1, 1<<shift)
	}
	v := rapid.OneOf(rapid.SampledFrom(edges), rapid.Uint64()).Draw(t, label)
	return v & (math.MaxUint64 >> (64 - bits))
}

func drawHead(t *rapid.T) encode.Head {
	return encode.Head{
		// An event id is never 0, which proto.Marshal omits.
		ID:   max(1, drawVarint(t, "event id", 64)),
		Rank: uint32(drawVarint(t, "rank", 32)),
		Tier: kvcastv1.Tier(rapid.IntRange(1, 4).Draw(t, "tier")),
	}
}

// hashesOf returns n distinct hashes.
func hashesOf(n int) []uint64 {
	hashes := make([]uint64, n)
	for i := range hashes {
		hashes[i] = uint64(i) * 0x9e3779b97f4a7c15
	}
	return hashes
}

// sizes cover length prefixes of one, two and three bytes.
var sizes = rapid.SampledFrom([]int{1, 2, 15, 16, 17, 127, 128, 2047, 2048, 2049})

// marshal returns the reference encoding of an event.
func marshal(t interface{ Fatal(...any) }, e *kvcastv1.RouterEvent) []byte {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(&kvcastv1.Entry{Events: []*kvcastv1.RouterEvent{e}})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// drawStored draws a stored event, and the equivalent message.
func drawStored(t *rapid.T) (*encode.Stored, *kvcastv1.Stored) {
	e := &encode.Stored{
		LoRA: rapid.StringN(0, 300, -1).Draw(t, "lora"), BlockSize: uint32(drawVarint(t, "block size", 32)),
		Parent: drawVarint(t, "parent", 64), HasParent: rapid.Bool().Draw(t, "has parent"), BlockHashes: hashesOf(sizes.Draw(t, "blocks")),
		SessionID: rapid.StringN(0, 300, -1).Draw(t, "session"),
	}
	if rapid.Bool().Draw(t, "hashed") {
		e.TokensHashes = hashesOf(len(e.BlockHashes))
	}
	if rapid.Bool().Draw(t, "tokens") {
		for range sizes.Draw(t, "tokens") / 16 {
			e.TokenIDs = append(e.TokenIDs, uint32(drawVarint(t, "token", 32)))
		}
	}
	s := &kvcastv1.Stored{BlockHashes: e.BlockHashes, TokensHashes: e.TokensHashes, BlockSize: e.BlockSize, TokenIds: e.TokenIDs, SessionId: e.SessionID}
	if e.HasParent {
		s.ParentHash = &e.Parent
	}
	if e.LoRA != "" {
		s.LoraName = &e.LoRA
	}
	return e, s
}

func TestStoredIsWhatMarshalGives(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := drawHead(t)
		stored, s := drawStored(t)
		want := marshal(t, &kvcastv1.RouterEvent{
			EventId: h.ID, DpRank: &h.Rank, Tier: h.Tier, Event: &kvcastv1.RouterEvent_Stored{Stored: s},
		})
		if got := encode.AppendStored(nil, kvcastv1.EntryEventsField, h, stored); !bytes.Equal(got, want) {
			t.Fatalf("stored (-want +got):\n%s", cmp.Diff(want, got))
		}
	})
}

func TestRemovedIsWhatMarshalGives(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h, hashes, reason := drawHead(t), hashesOf(sizes.Draw(t, "blocks")), rapid.SampledFrom([]string{"", "eviction"}).Draw(t, "reason")
		want := marshal(t, &kvcastv1.RouterEvent{
			EventId: h.ID, DpRank: &h.Rank, Tier: h.Tier,
			Event: &kvcastv1.RouterEvent_Removed{Removed: &kvcastv1.Removed{BlockHashes: hashes, Reason: reason}},
		})
		if got := encode.AppendRemoved(nil, kvcastv1.EntryEventsField, h, hashes, reason); !bytes.Equal(got, want) {
			t.Fatalf("removed (-want +got):\n%s", cmp.Diff(want, got))
		}
	})
}

// TestBytes pins the encoded bytes, since routers of other releases read them.
func TestBytes(t *testing.T) {
	head := encode.Head{ID: 300, Tier: kvcastv1.Tier_TIER_DEVICE}
	tests := map[string]struct {
		got  []byte
		want string
	}{
		"removed": {
			encode.AppendRemoved(nil, kvcastv1.EntryEventsField, head, []uint64{1}, ""),
			"32" + "13" + // events, 19 bytes
				"08ac02" + "1000" + "1801" + // event_id 300, dp_rank 0, tier device
				"2a0a" + "0a08" + "0100000000000000", // removed: block_hashes
		},
		"stored": {
			encode.AppendStored(nil, kvcastv1.EntryEventsField, head, &encode.Stored{BlockHashes: []uint64{1}}),
			"32" + "13" + "08ac02" + "1000" + "1801" +
				"220a" + "1208" + "0100000000000000", // stored: block_hashes
		},
		"stored with everything": {
			encode.AppendStored(nil, kvcastv1.EntryEventsField, head, &encode.Stored{
				Parent: 0, HasParent: true, BlockHashes: []uint64{1}, TokensHashes: []uint64{2},
				BlockSize: 16, LoRA: "a", TokenIDs: []uint32{3, 128},
			}),
			"32" + "30" + "08ac02" + "1000" + "1801" +
				"2227" + "090000000000000000" + // parent_hash 0, which is present
				"1208" + "0100000000000000" + "1a08" + "0200000000000000" +
				"2010" + "2a0161" + "3203" + "038001", // block_size, lora_name, token_ids
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if got := hex.EncodeToString(test.got); got != test.want {
				t.Errorf("bytes: got %s, want %s", got, test.want)
			}
		})
	}
}

func TestListsOfFixed64sAreRead(t *testing.T) {
	packed := encode.AppendHashes(nil, 1, []uint64{1, 2})
	for _, tt := range []struct {
		name    string
		message []byte
		want    []uint64
	}{
		{"packed", packed, []uint64{0, 1, 2}},
		{"not packed", protowire.AppendFixed64(protowire.AppendTag(nil, 1, protowire.Fixed64Type), 3), []uint64{0, 3}},
		{"of another type", protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 3), []uint64{0}},
		{"with a part of an element", append([]byte{packed[0], 15}, packed[2:17]...), nil},
	} {
		var f encode.Field
		_, err := f.Next(tt.message)
		if err != nil {
			t.Fatal(err)
		}
		got, err := f.AppendFixed64s([]uint64{0})
		if (err != nil) != (tt.want == nil) || err == nil && !slices.Equal(got, tt.want) {
			t.Errorf("%s: got %v, %v, want %v", tt.name, got, err, tt.want)
		}
	}
}

// TestFieldsAreReadLikeThoseOfProtowire reads messages of valid fields that are cut off or have other bytes at random places.
func TestFieldsAreReadLikeThoseOfProtowire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var message []byte
		for range rapid.IntRange(0, 5).Draw(t, "fields") {
			number := protowire.Number(rapid.OneOf(rapid.IntRange(1, 17), rapid.IntRange(1, 1<<29-1)).Draw(t, "number"))
			kind := protowire.Type(rapid.IntRange(0, 5).Draw(t, "type"))
			message = protowire.AppendTag(message, number, kind)
			switch kind {
			case protowire.VarintType:
				message = protowire.AppendVarint(message, drawVarint(t, "value", 64))
			case protowire.Fixed64Type:
				message = protowire.AppendFixed64(message, rapid.Uint64().Draw(t, "value"))
			case protowire.Fixed32Type:
				message = protowire.AppendFixed32(message, rapid.Uint32().Draw(t, "value"))
			case protowire.BytesType:
				message = protowire.AppendBytes(message, make([]byte, rapid.SampledFrom([]int{0, 1, 2, 127, 128, 300}).Draw(t, "length")))
			case protowire.StartGroupType:
				message = protowire.AppendTag(message, number, protowire.EndGroupType)
			default: // an end without a start
			}
		}
		if len(message) > 0 && rapid.Bool().Draw(t, "damage") {
			message[rapid.IntRange(0, len(message)-1).Draw(t, "at")] = rapid.Byte().Draw(t, "byte")
			message = message[:rapid.IntRange(0, len(message)).Draw(t, "end")]
		}
		got := encode.Field{Value: 7, Bytes: []byte("of another field")}
		for rest := message; ; {
			want, wantRest, wantErr := nextOfProtowire(rest)
			var err error
			if rest, err = got.Next(rest); (err != nil) != (wantErr != nil) {
				t.Fatalf("got error %v, want %v", err, wantErr)
			}
			if err != nil {
				return
			}
			if !cmp.Equal(got, want) || !bytes.Equal(rest, wantRest) {
				t.Fatalf("got %v and a rest of %d bytes, want %v and %d", got, len(rest), want, len(wantRest))
			}
		}
	})
}

// nextOfProtowire is encode.Field.Next with protowire's functions alone.
func nextOfProtowire(message []byte) (f encode.Field, rest []byte, err error) {
	number, kind, n := protowire.ConsumeField(message)
	if n < 0 {
		return f, nil, protowire.ParseError(n)
	}
	_, _, tag := protowire.ConsumeTag(message)
	f.Number, f.Type = number, kind
	switch value := message[tag:n]; kind {
	case protowire.VarintType:
		f.Value, _ = protowire.ConsumeVarint(value)
	case protowire.Fixed64Type:
		f.Value, _ = protowire.ConsumeFixed64(value)
	case protowire.BytesType:
		f.Bytes, _ = protowire.ConsumeBytes(value)
	default:
	}
	return f, message[n:], nil
}
