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

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	workerName = "vllm-0"
	modelName  = "Qwen/Qwen3-0.6B"
	blockSize  = 16
	// vocabulary has the size of current models' vocabularies: about half of all tokens are encoded
	// in five bytes, and half in three.
	vocabulary = 128_000
	// lapBlocks is the number of blocks of a lap: 4,096 batches in B1, 65,536 in B2. An engine of
	// the evicting loads has this many blocks.
	lapBlocks = 65_536
	// chainBlocks is the number of blocks of a prompt of 1,024 tokens.
	chainBlocks = 64
	// poolBlocks is the number of blocks at which an engine of the other loads is reset.
	poolBlocks = 1 << 20
)

// shape is the form of a load's batches: one store of this many blocks of 16 tokens each.
type shape struct {
	blocks int
	// evicts reports whether a batch first removes as many blocks as it stores: those stored one
	// lap earlier.
	evicts bool
	// endless reports whether the engine is never reset.
	endless bool
}

var (
	shapeB1 = shape{blocks: 16}
	shapeB2 = shape{blocks: 1}
)

// storeShapes are the shapes of batches that only store.
var storeShapes = []struct {
	name  string
	shape shape
}{{"B1", shapeB1}, {"B2", shapeB2}}

// load is an endless sequence of batches, as vLLM encodes them. One lap of batches is encoded in
// advance. Later laps overwrite the hashes and the first token of each block in place, so that every
// block is new and has a new content. Storing a present block, or a second block of the same content, is a
// rarer code path.
//
// Prompts have chainBlocks blocks each; a prompt's first block has no parent. Blocks stay until the engine evicts them (if the load evicts) or is reset at poolBlocks: one batch in 65,536 or
// more clears everything.
type load struct {
	shape   shape
	batches []encoded
	reset   []byte

	sent    int    // batches, resets included
	stored  int    // blocks so far
	removed int    // blocks so far
	present int    // blocks stored now
	at      int    // index of the next batch
	lap     uint64 // current lap
}

// encoded is a batch whose hashes and first tokens have known offsets, so that they can be overwritten.
type encoded struct {
	payload []byte
	hashes  []hashField
	tokens  []tokenField
}

type hashField struct {
	offset int
	hash   uint64
	// old reports whether the hash is of the previous lap.
	old bool
}

// tokenField is the first token of a block.
type tokenField struct {
	offset int
	token  uint32
}

// The first token of each block is at least wideToken, and so is encoded in five bytes. It is markedToken plus the
// block's index until the first lap overwrites it.
const (
	wideToken   = 1 << 16
	markedToken = 1 << 31
)

// timeOffset is the offset of a batch's time: it follows the codes of an array and of a float.
const timeOffset = 2

// newLoad encodes the first lap.
func newLoad(s shape) *load {
	l := &load{shape: s}
	r := rand.New(rand.NewPCG(uint64(s.blocks), 5))
	encoder := wire.Encoder{}
	encode := func(events ...wire.Event) []byte {
		payload := encoder.AppendBatch(nil, &wire.Batch{Time: 1757500000.25, HasTime: true, HasRank: true, Events: events})
		return payload
	}
	parent := uint64(0)
	for n := range lapBlocks / s.blocks {
		continues := n*s.blocks%chainBlocks != 0
		store := wire.Event{
			Kind: wire.KindStored, Parent: parent, HasParent: continues, BlockSize: blockSize, Medium: "GPU",
			BlockHashes: make([]uint64, s.blocks), Tokens: make([]uint32, blockSize*s.blocks),
		}
		remove := wire.Event{Kind: wire.KindRemoved, BlockHashes: make([]uint64, s.blocks), Medium: "GPU"}
		for k := range store.Tokens {
			store.Tokens[k] = r.Uint32N(vocabulary)
		}
		var e encoded
		for k := range store.BlockHashes {
			e.tokens = append(e.tokens, tokenField{token: r.Uint32N(vocabulary - wideToken)})
			store.Tokens[k*blockSize] = markedToken + uint32(k)
			store.BlockHashes[k], remove.BlockHashes[k] = newHash(r), newHash(r)
			e.hashes = append(e.hashes, hashField{hash: store.BlockHashes[k]})
		}
		if continues {
			e.hashes = append(e.hashes, hashField{hash: parent})
		}
		parent = store.BlockHashes[s.blocks-1]
		events := []wire.Event{store}
		if s.evicts {
			events = []wire.Event{remove, store}
		}
		e.payload = encode(events...)
		for k := range e.hashes {
			e.hashes[k].offset = offsetOf(e.payload, e.hashes[k].hash)
		}
		for k := range e.tokens {
			e.tokens[k].offset = bytes.Index(e.payload, binary.BigEndian.AppendUint32([]byte{0xce}, markedToken+uint32(k))) + 1
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

// newHash returns a hash of nine bytes in a payload, as all but one in 4 billion have.
func newHash(r *rand.Rand) uint64 { return r.Uint64() | 1<<63 }

// offsetOf returns the offset of a hash in a payload, after its code.
func offsetOf(payload []byte, hash uint64) int {
	return bytes.Index(payload, binary.BigEndian.AppendUint64([]byte{0xcf}, hash)) + 1
}

// next returns the payload of the next batch with the given time. The payload is valid until the
// next lap overwrites it.
func (l *load) next(now time.Time) []byte {
	l.sent++
	if !l.shape.evicts && !l.shape.endless && l.present >= poolBlocks {
		l.present = 0
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
	for _, t := range e.tokens {
		const tokens = vocabulary - wideToken
		binary.BigEndian.PutUint32(e.payload[t.offset:], wideToken+(t.token+uint32(l.lap%tokens))%tokens)
	}
	l.stored += l.shape.blocks
	l.present += l.shape.blocks
	if l.shape.evicts {
		l.removed += l.shape.blocks // unknown blocks in the first lap
		if l.lap > 0 {
			l.present -= l.shape.blocks
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

// lapMask returns the mask that makes the hashes of a lap unique. It leaves the highest bit unchanged.
func lapMask(lap uint64) uint64 {
	// splitmix64
	z := (lap + 1) * 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return (z ^ z>>31) >> 1
}

// entryBytes returns the size in a response of an entry that stores this many blocks after others.
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

// TestLoadHasItsShape decodes several laps and tracks the blocks of the engine.
func TestLoadHasItsShape(t *testing.T) {
	testclass.WithoutRace(t)
	for _, s := range []shape{shapeB1, {blocks: 16, evicts: true}, {blocks: 4, evicts: true}} {
		l := newLoad(s)
		present := make(map[uint64]struct{})
		contents := make(map[uint64]struct{})
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
				for k, h := range e.BlockHashes {
					_, ok := present[h]
					switch e.Kind {
					case wire.KindStored:
						stored++
						present[h] = struct{}{}
						if ok {
							t.Fatalf("%+v: batch %d stores a block that is there", s, sent)
						}
						content := kvblock.AppendTokensHashes(nil, e.Tokens[k*blockSize:][:blockSize], blockSize, 0, false, nil)[0]
						if _, ok := contents[content]; ok {
							t.Fatalf("%+v: batch %d stores a content again", s, sent)
						}
						contents[content] = struct{}{}
					default:
						delete(present, h)
						if !ok && sent > len(l.batches) {
							t.Fatalf("%+v: batch %d removes a block that is not there", s, sent)
						}
					}
				}
				_, known := present[e.Parent]
				continues := (sent-1)*s.blocks%chainBlocks != 0
				if e.Kind == wire.KindStored && (len(e.BlockHashes) != s.blocks || len(e.Tokens) != blockSize*s.blocks ||
					e.HasParent != continues || continues && !known) {
					t.Fatalf("%+v: batch %d: %d blocks, %d tokens, parent %v, known %v",
						s, sent, len(e.BlockHashes), len(e.Tokens), e.HasParent, known)
				}
			}
		}
		if sent != l.sent || stored != l.stored || len(present) != l.present {
			t.Errorf("%+v: sent %d, stored %d, present %d; it says %d, %d, %d", s, sent, stored, len(present), l.sent, l.stored, l.present)
		}
	}
}
