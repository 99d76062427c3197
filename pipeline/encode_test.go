package pipeline

import (
	"bytes"
	"context"
	"math"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// These tests are internal, since counting up to event ids of ten bytes takes too long.

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

// drawStored draws a run, and the equivalent message.
func drawStored(t *rapid.T) (*run, *kvcastv1.Stored) {
	r := &run{
		key: runKey{
			lora:      rapid.StringN(0, 300, -1).Draw(t, "lora"),
			blockSize: uint32(drawVarint(t, "block size", 32)),
		},
		parent:    drawVarint(t, "parent", 64),
		hasParent: rapid.Bool().Draw(t, "has parent"),
		hashes:    hashesOf(sizes.Draw(t, "blocks")),
	}
	if rapid.Bool().Draw(t, "hashed") {
		r.tokensHashes = hashesOf(len(r.hashes))
	}
	if rapid.Bool().Draw(t, "tokens") {
		for range sizes.Draw(t, "tokens") / 16 {
			r.tokens = append(r.tokens, uint32(drawVarint(t, "token", 32)))
		}
	}
	s := &kvcastv1.Stored{
		BlockHashes: r.hashes, TokensHashes: r.tokensHashes, BlockSize: r.key.blockSize, TokenIds: r.tokens,
	}
	if r.hasParent {
		s.ParentHash = &r.parent
	}
	if r.key.lora != "" {
		s.LoraName = &r.key.lora
	}
	return r, s
}

// entryIsWhatMarshalGives compares whole entries, as a response contains them, with
// proto.Marshal: worker, model, times, events of all kinds, and the seq that is set last.
func entryIsWhatMarshalGives(t *rapid.T) {
	j := journal.NewMemory(journal.Config{})
	worker, model := rapid.StringN(1, 200, 253).Draw(t, "worker"), rapid.StringN(0, 200, -1).Draw(t, "model")
	mu := new(sync.Mutex)
	mu.Lock()
	e := newEntry(context.Background(), mu, j, worker, model, maxEntryBytes)
	want := &kvcastv1.SubscribeResponse{}
	for seq := range rapid.Uint64Range(1, 3).Draw(t, "entries") {
		engine, ingest := rapid.Int64().Draw(t, "engine time"), rapid.Int64().Draw(t, "ingest time")
		entry := &kvcastv1.Entry{Seq: seq + 1, Worker: worker, Model: model, EngineTimeUnixNano: engine, IngestTimeUnixNano: ingest}
		e.begin(engine, ingest)
		for range rapid.IntRange(1, 4).Draw(t, "events") {
			h := drawHead(t)
			ev := &kvcastv1.RouterEvent{EventId: h.ID, DpRank: &h.Rank, Tier: h.Tier}
			switch rapid.IntRange(0, 3).Draw(t, "kind") {
			case 0:
				ev.Event = &kvcastv1.RouterEvent_Gap{Gap: &kvcastv1.Gap{Reason: 1, FirstSeq: drawVarint(t, "first", 64)}}
				ev.Tier = 0
				e.other(ev)
			case 1:
				hashes := hashesOf(sizes.Draw(t, "blocks"))
				ev.Event = &kvcastv1.RouterEvent_Removed{Removed: &kvcastv1.Removed{BlockHashes: hashes}}
				e.added(encode.AppendRemoved(e.buf, kvcastv1.EntryEventsField, h, hashes, ""), 0)
			default:
				r, s := drawStored(t)
				ev.Event = &kvcastv1.RouterEvent_Stored{Stored: s}
				e.stored(h, r)
			}
			entry.Events = append(entry.Events, ev)
		}
		if err := e.commit(nil); err != nil {
			t.Fatal(err)
		}
		want.Entries = append(want.Entries, entry)
	}
	encoded, err := proto.MarshalOptions{Deterministic: true}.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	c, err := j.Read(context.Background(), journal.Query{MaxBytes: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	if got := bytes.Join(c.Slices, nil); !bytes.Equal(got, encoded) {
		t.Fatalf("entries (-want +got):\n%s", cmp.Diff(encoded, got))
	}
}

func TestEntryIsWhatMarshalGives(t *testing.T) { rapid.Check(t, entryIsWhatMarshalGives) }

// FuzzEntry makes the same comparison with fuzzed input.
func FuzzEntry(f *testing.F) { f.Fuzz(rapid.MakeFuzz(entryIsWhatMarshalGives)) }
