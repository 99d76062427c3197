package wire_test

import (
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
)

// plainScan is ScanTokens without optimizations. It reads up to the payload's end.
func plainScan(tokens []uint32, p []byte, i int) (k, end int) {
	for ; k < len(tokens) && i < len(p); k++ {
		if c := p[i]; c > 0x7f && c != 0xcc && c != 0xcd && c != 0xce {
			break
		}
		n, rest, err := msgp.ReadUint32Bytes(p[i:])
		if err != nil {
			break
		}
		tokens[k] = n
		i = len(p) - len(rest)
	}
	return k, i
}

// TestScanTokensEqualsPlainLoop compares ScanTokens with plainScan, on tokens of one width and
// of mixed widths, truncated and interrupted at random places.
func TestScanTokensEqualsPlainLoop(t *testing.T) {
	testclass.WithoutRace(t)
	r := rand.New(rand.NewPCG(4, 5))
	for range 20_000 {
		var p []byte
		wide, room := r.IntN(100), r.IntN(200)
		for k := range r.IntN(200) {
			switch {
			case k < wide:
				p = append(p, 0xce, byte(r.Uint32()), byte(r.Uint32()), byte(r.Uint32()), byte(r.Uint32()))
			case r.IntN(100) == 0:
				p = append(p, byte(r.Uint32()))
			default:
				p = msgp.AppendUint32(p, drawToken(r))
			}
		}
		p = p[:len(p)-r.IntN(len(p)/8+1)]
		i := r.IntN(min(len(p), 8) + 1)
		want, got := make([]uint32, room), make([]uint32, room)
		wantK, wantEnd := plainScan(want, p, i)
		gotK, gotEnd := wire.ScanTokens(got, p, i)
		// It may stop at any token that begins in the last seven bytes.
		stopped := gotK < wantK && gotEnd < wantEnd && gotEnd+8 > len(p)
		if !stopped && (gotK != wantK || gotEnd != wantEnd) || !cmp.Equal(want[:gotK], got[:gotK]) {
			t.Fatalf("% x at %d, room for %d: %d tokens up to %d, want %d up to %d", p, i, room, gotK, gotEnd, wantK, wantEnd)
		}
	}
}
