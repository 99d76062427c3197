package bench_test

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/ingest/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	workerName = "vllm-0"
	modelName  = "Qwen/Qwen3-0.6B"
	blockSize  = 16
	// vocabulary is that of current models: about half of all tokens take five
	// bytes in a payload, and half three.
	vocabulary = 128_000
	// lapBlocks are the blocks of a lap: at B1 4,096 batches, at B2 65,536. It is
	// what an engine of the evicting loads holds.
	lapBlocks = 65_536
	// chainBlocks is how many blocks a prompt has, of 1,024 tokens.
	chainBlocks = 64
	// poolBlocks is what an engine of the other loads holds before it is reset.
	poolBlocks = 1 << 20
)

// shape is what the batches of a load look like: one store of so many blocks of
// 16 tokens each.
type shape struct {
	blocks int
	// evicts says that a batch also removes as many blocks, before it stores: those
	// stored a lap before.
	evicts bool
	// endless says that the engine is never reset.
	endless bool
}

var (
	shapeB1 = shape{blocks: 16}
	shapeB2 = shape{blocks: 1}
)

// load is batches without end, as vLLM encodes them. A lap of them is encoded
// beforehand; further laps have the same tokens and other hashes, set in place,
// so that every block is new. A store of a block that is there already would
// count a copy, which is another path, and seldom taken.
//
// Prompts are of chainBlocks blocks each; the parent of a prompt's first block
// is one that is not there. What is stored stays until the engine evicts it (if
// the load does), or is reset once it holds poolBlocks: one batch among 65,536
// and more clears everything.
type load struct {
	shape   shape
	batches []encoded
	reset   []byte

	sent    int    // batches, resets included
	stored  int    // blocks so far
	removed int    // blocks so far
	held    int    // blocks now
	at      int    // the next of the batches
	lap     uint64 // which they are in
}

// encoded is a batch whose hashes stand where they can be set.
type encoded struct {
	payload []byte
	hashes  []hashField
}

type hashField struct {
	offset int
	hash   uint64
	// old says that it is of the lap before.
	old bool
}

// timeOffset is where the time of a batch is: after the codes of an array and of
// a float.
const timeOffset = 2

// newLoad encodes the first lap.
func newLoad(s shape) *load {
	l := &load{shape: s}
	r := rand.New(rand.NewPCG(uint64(s.blocks), 5))
	encoder := wire.Encoder{}
	encode := func(events ...wire.Event) []byte {
		payload, err := encoder.AppendBatch(nil, &wire.Batch{Time: 1757500000.25, HasTime: true, HasRank: true, Events: events})
		if err != nil {
			panic(err) // the events are made here
		}
		return payload
	}
	parent := uint64(0)
	for n := range lapBlocks / s.blocks {
		if n*s.blocks%chainBlocks == 0 {
			parent = newHash(r)
		}
		store := wire.Event{
			Kind: wire.KindStored, Parent: parent, HasParent: true, BlockSize: blockSize, Medium: "GPU",
			BlockHashes: make([]uint64, s.blocks), Tokens: make([]uint32, blockSize*s.blocks),
		}
		remove := wire.Event{Kind: wire.KindRemoved, BlockHashes: make([]uint64, s.blocks), Medium: "GPU"}
		for k := range store.Tokens {
			store.Tokens[k] = r.Uint32N(vocabulary)
		}
		var e encoded
		for k := range store.BlockHashes {
			store.BlockHashes[k], remove.BlockHashes[k] = newHash(r), newHash(r)
			e.hashes = append(e.hashes, hashField{hash: store.BlockHashes[k]})
		}
		e.hashes = append(e.hashes, hashField{hash: parent})
		parent = store.BlockHashes[s.blocks-1]
		events := []wire.Event{store}
		if s.evicts {
			events = []wire.Event{remove, store}
		}
		e.payload = encode(events...)
		for k := range e.hashes {
			e.hashes[k].offset = offsetOf(e.payload, e.hashes[k].hash)
		}
		if s.evicts {
			for k, h := range remove.BlockHashes {
				e.hashes = append(e.hashes, hashField{offset: offsetOf(e.payload, h), hash: store.BlockHashes[k], old: true})
			}
		}
		l.batches = append(l.batches, e)
	}
	l.reset = encode(wire.Event{Kind: wire.KindCleared})
	return l
}

// newHash is one that takes nine bytes in a payload, like all but one in 4 billion.
func newHash(r *rand.Rand) uint64 { return r.Uint64() | 1<<63 }

// offsetOf is where a hash stands in a payload, without its code.
func offsetOf(payload []byte, hash uint64) int {
	return bytes.Index(payload, binary.BigEndian.AppendUint64([]byte{0xcf}, hash)) + 1
}

// next returns the payload of the next batch, with that time on it. It is good
// until a lap later.
func (l *load) next(now time.Time) []byte {
	l.sent++
	if !l.shape.evicts && !l.shape.endless && l.held >= poolBlocks {
		l.held = 0
		return stamp(l.reset, now)
	}
	e := &l.batches[l.at]
	fresh, old := lapMask(l.lap), lapMask(l.lap-1)
	for _, h := range e.hashes {
		mask := fresh
		if h.old {
			mask = old
		}
		binary.BigEndian.PutUint64(e.payload[h.offset:], h.hash^mask)
	}
	l.stored += l.shape.blocks
	l.held += l.shape.blocks
	if l.shape.evicts {
		l.removed += l.shape.blocks // in the first lap of blocks that nobody knows
		if l.lap > 0 {
			l.held -= l.shape.blocks
		}
	}
	if l.at++; l.at == len(l.batches) {
		l.at, l.lap = 0, l.lap+1
	}
	return stamp(e.payload, now)
}

func stamp(payload []byte, now time.Time) []byte {
	seconds := float64(now.UnixMicro()) / 1e6
	binary.BigEndian.PutUint64(payload[timeOffset:], math.Float64bits(seconds))
	return payload
}

// lapMask tells the hashes of one lap from those of another. It leaves the
// highest bit alone.
func lapMask(lap uint64) uint64 {
	// splitmix64
	z := (lap + 1) * 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return (z ^ z>>31) >> 1
}

// entryBytes is what an entry of a store of so many blocks takes in a response.
func entryBytes(blocks int) int {
	e := &kvcastv1.Entry{
		Seq: 1, Worker: workerName, Model: modelName, EngineTimeUnixNano: 1, IngestTimeUnixNano: 1,
		Events: []*kvcastv1.RouterEvent{{
			EventId: 100_000, DpRank: new(uint32), Tier: kvcastv1.Tier_TIER_DEVICE,
			Event: &kvcastv1.RouterEvent_Stored{Stored: &kvcastv1.Stored{
				ParentHash: proto.Uint64(1), BlockHashes: make([]uint64, blocks), TokensHashes: make([]uint64, blocks), BlockSize: blockSize,
			}},
		}},
	}
	return protowire.SizeTag(kvcastv1.ResponseEntriesField) + protowire.SizeBytes(proto.Size(e))
}

// TestLoadHasItsShape decodes several laps and follows what the engine holds.
func TestLoadHasItsShape(t *testing.T) {
	for _, s := range []shape{shapeB1, {blocks: 16, evicts: true}, {blocks: 4, evicts: true}} {
		l := newLoad(s)
		held := make(map[uint64]struct{})
		var d wire.Decoder
		var stored, sent int
		now := time.Unix(1757500000, 123_456_000)
		for range 2*len(l.batches) + 7 {
			b, err := d.Decode(l.next(now))
			if err != nil {
				t.Fatal(err)
			}
			sent++
			if got := int64(math.Round(b.Time * 1e6)); got != now.UnixMicro() {
				t.Fatalf("time: got %d, want %d", got, now.UnixMicro())
			}
			for _, e := range b.Events {
				for _, h := range e.BlockHashes {
					_, ok := held[h]
					switch e.Kind {
					case wire.KindStored:
						stored++
						held[h] = struct{}{}
						if ok {
							t.Fatalf("%+v: batch %d stores a block that is there", s, sent)
						}
					default:
						delete(held, h)
						if !ok && sent > len(l.batches) {
							t.Fatalf("%+v: batch %d removes a block that is not there", s, sent)
						}
					}
				}
				if e.Kind == wire.KindStored && (len(e.BlockHashes) != s.blocks || len(e.Tokens) != blockSize*s.blocks || !e.HasParent) {
					t.Fatalf("%+v: %d blocks, %d tokens", s, len(e.BlockHashes), len(e.Tokens))
				}
			}
		}
		if sent != l.sent || stored != l.stored || len(held) != l.held {
			t.Errorf("%+v: sent %d, stored %d, held %d; it says %d, %d, %d", s, sent, stored, len(held), l.sent, l.stored, l.held)
		}
	}
}
