package wire_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
)

// vocabulary is the approximate size of Qwen 3's vocabulary.
const vocabulary = 151_936

// drawToken draws a token whose code cannot be predicted. One in eight is encoded in one byte,
// like punctuation and digits. One in 32 has one byte after its code. Of the others, nearly
// half have two bytes after the code, and the rest four.
func drawToken(r *rand.Rand) uint32 {
	switch n := r.Uint32N(32); {
	case n < 4:
		return r.Uint32N(1 << 7)
	case n < 5:
		return 1<<7 + r.Uint32N(1<<7)
	default:
		return 1<<8 + r.Uint32N(vocabulary-1<<8)
	}
}

// store returns a batch of one store of blocks of 16 tokens, with the fields that vLLM sets
// without a LoRA adapter.
func store(blocks int) *wire.Batch {
	return drawStore(rand.New(rand.NewPCG(1, uint64(blocks))), blocks)
}

func drawStore(r *rand.Rand, blocks int) *wire.Batch {
	ev := wire.Event{
		Kind:      wire.KindStored,
		Parent:    r.Uint64() | 1<<63,
		HasParent: true,
		BlockSize: 16,
		Medium:    "GPU",
	}
	for range blocks {
		ev.BlockHashes = append(ev.BlockHashes, r.Uint64()|1<<63)
	}
	for range 16 * blocks {
		ev.Tokens = append(ev.Tokens, drawToken(r))
	}
	return &wire.Batch{Time: 1757500000.25, HasTime: true, Rank: 0, HasRank: true, Events: []wire.Event{ev}}
}

var formNames = map[wire.Form]string{wire.FormArray: "array", wire.FormMap: "map"}

// benchPayloads calls bench for B1, stores of 16 blocks, and B2, stores of one block, in both
// forms. The payloads of each have 32,768 random tokens together: a branch predictor would
// learn a thousand tokens, and a loop that branches on their codes would appear twice as fast.
func benchPayloads(b *testing.B, bench func(b *testing.B, payloads [][]byte)) {
	for _, size := range []struct {
		name   string
		blocks int
	}{{"B1", 16}, {"B2", 1}} {
		for _, form := range []wire.Form{wire.FormArray, wire.FormMap} {
			b.Run(fmt.Sprintf("%s/%s", size.name, formNames[form]), func(b *testing.B) {
				e := wire.Encoder{BatchForm: form, EventForm: form}
				r := rand.New(rand.NewPCG(2, 3))
				var (
					payloads [][]byte
					bytes    int
				)
				for range 2048 / size.blocks {
					p := e.AppendBatch(nil, drawStore(r, size.blocks))
					payloads = append(payloads, p)
					bytes += len(p)
				}
				b.SetBytes(int64(bytes / len(payloads)))
				b.ReportAllocs()
				bench(b, payloads)
			})
		}
	}
}

func BenchmarkDecode(b *testing.B) {
	benchPayloads(b, func(b *testing.B, payloads [][]byte) {
		var d wire.Decoder
		for n := 0; b.Loop(); n++ {
			if _, err := d.Decode(payloads[n%len(payloads)]); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkDecodeAdmit(b *testing.B) {
	benchPayloads(b, func(b *testing.B, payloads [][]byte) {
		var (
			d      wire.Decoder
			size   wire.BlockSize
			counts wire.Counts
		)
		rules := wire.NewRules(&size)
		for n := 0; b.Loop(); n++ {
			batch, err := d.Decode(payloads[n%len(payloads)])
			if err != nil {
				b.Fatal(err)
			}
			rules.Admit(batch, 0, &counts)
		}
	})
}

// BenchmarkGenericDecode measures a general MessagePack package that decodes the same
// payloads into interfaces.
func BenchmarkGenericDecode(b *testing.B) {
	benchPayloads(b, func(b *testing.B, payloads [][]byte) {
		for n := 0; b.Loop(); n++ {
			var batch any
			if err := msgpack.Unmarshal(payloads[n%len(payloads)], &batch); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkFloorWalk is a lower bound for a decoder: one pass over the values of the payload,
// which recognises each value by its code, and stores only the tokens.
func BenchmarkFloorWalk(b *testing.B) {
	benchPayloads(b, func(b *testing.B, payloads [][]byte) {
		tokens := make([]uint32, 1024)
		stored := 0
		for n := 0; b.Loop(); n++ {
			stored = floorWalk(payloads[n%len(payloads)], tokens)
		}
		if stored == 0 {
			b.Fatal("nothing was stored")
		}
	})
}

// floorWalk stores the numbers of up to 32 bits, which are the tokens and block_size, and
// returns how many there are. It ignores the structure of the payload. The payload must have
// only codes that vLLM uses, and only values of one byte in its last 8 bytes, which floorWalk
// skips. floorWalk reads numbers without a branch on their widths, which are random, and other
// values with branches, which can be predicted. With a table of lengths for all codes, or with
// a branch for each code, it would take half as long again.
func floorWalk(p []byte, tokens []uint32) int {
	n := 0
	for i := 0; i < len(p); {
		c := p[i]
		if s := walkShifts[c]; s.right != 0 && i+8 <= len(p) && n < len(tokens) {
			w := binary.BigEndian.Uint64(p[i:])
			tokens[n] = uint32(w << (s.left & 63) >> (s.right & 63))
			n++
			i += 1 + int(c>>7)<<(c&3)
			continue
		}
		switch {
		case c == 0xcf, c == 0xcb:
			i += 9
		case c == 0xdc, c == 0xde:
			i += 3
		case c >= 0xa0 && c <= 0xbf:
			i += 1 + int(c&0x1f)
		default:
			i++
		}
	}
	return n
}

// TestFloorWalk checks that floorWalk stores the tokens and the block size.
func TestFloorWalk(t *testing.T) {
	for _, blocks := range []int{1, 16} {
		batch := store(blocks)
		want := append(slices.Clone(batch.Events[0].Tokens), batch.Events[0].BlockSize)
		for form, name := range formNames {
			e := wire.Encoder{BatchForm: form, EventForm: form}
			payload := e.AppendBatch(nil, batch)
			tokens := make([]uint32, len(want)+1)
			n := floorWalk(payload, tokens)
			if diff := cmp.Diff(want, tokens[:n]); diff != "" {
				t.Errorf("%d blocks, %s: tokens differ (-want +got):\n%s", blocks, name, diff)
			}
		}
	}
}

// walkShifts are indexed by the code of a number. To extract the number, the eight bytes that
// begin with the code are shifted left and then right by this many bits.
var walkShifts = func() (t [256]struct{ left, right uint8 }) {
	for c := range 0x80 {
		t[c].right = 56
	}
	t[0xcc].left, t[0xcc].right = 8, 56
	t[0xcd].left, t[0xcd].right = 8, 48
	t[0xce].left, t[0xce].right = 8, 32
	return t
}()

func BenchmarkEncode(b *testing.B) {
	for _, blocks := range []int{1, 16} {
		batch := store(blocks)
		for form, name := range formNames {
			b.Run(fmt.Sprintf("%d/%s", blocks, name), func(b *testing.B) {
				e := wire.Encoder{BatchForm: form, EventForm: form}
				payload := e.AppendBatch(nil, batch)
				b.ReportAllocs()
				for b.Loop() {
					e.AppendBatch(payload[:0], batch)
				}
			})
		}
	}
}

func BenchmarkTokensHashes(b *testing.B) {
	tokens := store(16).Events[0].Tokens
	hashes := make([]uint64, 0, 16)
	b.SetBytes(int64(4 * len(tokens)))
	for b.Loop() {
		hashes = kvblock.AppendTokensHashes(hashes[:0], tokens, 16, kvblock.Seed("", ""), false, nil)
	}
	if len(hashes) != 16 {
		b.Fatalf("%d hashes, want 16", len(hashes))
	}
}
