package wire_test

import (
	"bytes"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvcast/kvcast/ingest/wire"
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
