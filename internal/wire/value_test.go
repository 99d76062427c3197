package wire_test

import (
	"bytes"
	"math"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvcast/kvcast/internal/wire"
)

// TestFastPathsEqualReadValue compares the fast paths to readValue,
// for every code, in payloads of any length.
func TestFastPathsEqualReadValue(t *testing.T) {
	for code := range 256 {
		for _, fill := range []byte{0, 1, 7, 0xff} {
			whole := bytes.Repeat([]byte{fill}, 44)
			for _, i := range []int{0, 1, 4} {
				whole[i] = byte(code)
				for n := i; n <= len(whole); n++ {
					checkFastPaths(t, whole[:n], i)
				}
				whole[i] = fill
			}
		}
	}
}

// TestReadValueEqualsMsgp compares readValue to package msgp, for every code and truncation, except for arrays and maps.
func TestReadValueEqualsMsgp(t *testing.T) {
	for code := range 256 {
		for _, fill := range []byte{0, 1, 7, 0x80, 0xff} {
			p := append([]byte{byte(code)}, bytes.Repeat([]byte{fill}, 40)...)
			for n := 1; n <= len(p); n++ {
				p := p[:n]
				_, _, end, fault := wire.ReadValue(p, 0)
				rest, err := msgp.Skip(p)
				switch msgp.NextType(p) {
				case msgp.ArrayType, msgp.MapType:
					continue
				case msgp.IntType:
					checkBits(t, p, msgp.ReadInt64Bytes, func(v int64) uint64 { return uint64(v) })
				case msgp.UintType:
					checkBits(t, p, msgp.ReadUint64Bytes, func(v uint64) uint64 { return v })
				case msgp.Float32Type, msgp.Float64Type:
					checkBits(t, p, msgp.ReadFloat64Bytes, math.Float64bits)
				case msgp.BoolType:
					checkBits(t, p, msgp.ReadBoolBytes, func(v bool) uint64 { return map[bool]uint64{true: 1}[v] })
				default:
				}
				if (err != nil) != (fault != 0) || err == nil && end != len(p)-len(rest) {
					t.Errorf("% x: end %d, fault %d; want end %d, error %v", p, end, fault, len(p)-len(rest), err)
				}
			}
		}
	}
}

func checkBits[T any](t *testing.T, p []byte, read func([]byte) (T, []byte, error), bits func(T) uint64) {
	t.Helper()
	want, _, err := read(p)
	if got := wire.ReadBits(p, 0); err == nil && got != bits(want) {
		t.Errorf("% x: number %x, want %v", p, got, want)
	}
}

type header struct{ class, n, at, fault int }

func checkFastPaths(t *testing.T, p []byte, i int) {
	t.Helper()
	var want, got header
	want.class, want.n, want.at, want.fault = wire.ReadValue(p, i)
	got.class, got.n, got.at, got.fault = wire.ReadHeader(p, i)
	if want != got {
		t.Errorf("% x at %d: header %+v, want %+v", p, i, got, want)
	}
	if s := wire.ShortText(p, i); s != nil {
		if want.fault != 0 || want.class != wire.ClassStr || !bytes.Equal(s, p[want.at-len(s):want.at]) {
			t.Errorf("% x at %d: string %q, want %+v", p, i, s, want)
		}
	}
	if bits, ok := wire.ReadFixed64(p, i, 0xcf); ok {
		if n, rest, err := msgp.ReadUint64Bytes(p[i:]); err != nil || n != bits || len(p)-len(rest) != i+9 {
			t.Errorf("% x at %d: number %d, want %d, error %v", p, i, bits, n, err)
		}
	}
}
