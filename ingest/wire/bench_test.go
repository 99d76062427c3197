package wire_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvcast/kvcast/ingest/wire"
)

// store returns a batch of one store of blocks of 16 tokens, drawn from a
// vocabulary of 128,256 as Llama 3 has it, so that their widths mix.
func store(blocks int) *wire.Batch {
	r := rand.New(rand.NewPCG(1, uint64(blocks)))
	ev := wire.Event{
		Kind:      wire.KindStored,
		Parent:    r.Uint64(),
		HasParent: true,
		BlockSize: 16,
		Medium:    "GPU",
	}
	for range blocks {
		ev.BlockHashes = append(ev.BlockHashes, r.Uint64()|1<<63)
	}
	for range 16 * blocks {
		ev.Tokens = append(ev.Tokens, r.Uint32N(128_256))
	}
	return &wire.Batch{Time: 1757500000.25, HasTime: true, Rank: 0, HasRank: true, Events: []wire.Event{ev}}
}

var formNames = map[wire.Form]string{wire.FormArray: "array", wire.FormMap: "map"}

// benchPayloads calls bench for B1 and B2, one store of 16 blocks and of one, in
// both forms. The variants of a payload have other tokens and hashes: a loop
// over one payload alone would teach the branch predictor its widths by heart.
func benchPayloads(b *testing.B, bench func(b *testing.B, payloads [][]byte)) {
	for _, size := range []struct {
		name   string
		blocks int
	}{{"B1", 16}, {"B2", 1}} {
		for _, form := range []wire.Form{wire.FormArray, wire.FormMap} {
			b.Run(fmt.Sprintf("%s/%s", size.name, formNames[form]), func(b *testing.B) {
				e := wire.Encoder{BatchForm: form, EventForm: form}
				r := rand.New(rand.NewPCG(2, 3))
				var payloads [][]byte
				for range 64 {
					batch := store(size.blocks)
					for k := range batch.Events[0].Tokens {
						batch.Events[0].Tokens[k] = r.Uint32N(128_256)
					}
					payloads = append(payloads, e.AppendBatch(nil, batch))
				}
				b.SetBytes(int64(len(payloads[0])))
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
			size   uint32
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

// BenchmarkFloorWalk is what a decoder cannot well be below: one pass over the
// values of the payload, each recognised by its code, numbers stored.
func BenchmarkFloorWalk(b *testing.B) {
	benchPayloads(b, func(b *testing.B, payloads [][]byte) {
		tokens := make([]uint32, 0, 1024)
		hashes := make([]uint64, 0, 1024)
		for n := 0; b.Loop(); n++ {
			tokens, hashes = floorWalk(payloads[n%len(payloads)], tokens[:0], hashes[:0])
		}
		if len(tokens) == 0 || len(hashes) == 0 {
			b.Fatal("nothing was stored")
		}
	})
}

// floorWalk trusts the payload, and knows no structure.
func floorWalk(p []byte, tokens []uint32, hashes []uint64) ([]uint32, []uint64) {
	for i := 0; i < len(p); {
		switch c := p[i]; {
		case c <= 0x7f:
			tokens = append(tokens, uint32(c))
			i++
		case c == 0xcd:
			tokens = append(tokens, uint32(binary.BigEndian.Uint16(p[i+1:])))
			i += 3
		case c == 0xce:
			tokens = append(tokens, binary.BigEndian.Uint32(p[i+1:]))
			i += 5
		case c == 0xcf, c == 0xcb:
			hashes = append(hashes, binary.BigEndian.Uint64(p[i+1:]))
			i += 9
		case c == 0xcc:
			tokens = append(tokens, uint32(p[i+1]))
			i += 2
		case c == 0xdc, c == 0xde:
			i += 3
		case c >= 0xa0 && c <= 0xbf:
			i += 1 + int(c&0x1f)
		default:
			i++
		}
	}
	return tokens, hashes
}

func BenchmarkTokensHashes(b *testing.B) {
	tokens := store(16).Events[0].Tokens
	hashes := make([]uint64, 0, 16)
	b.SetBytes(int64(4 * len(tokens)))
	for b.Loop() {
		hashes = wire.AppendTokensHashes(hashes[:0], tokens, 16, wire.BlockSeed("", ""), false, nil)
	}
	if len(hashes) != 16 {
		b.Fatalf("%d hashes, want 16", len(hashes))
	}
}
