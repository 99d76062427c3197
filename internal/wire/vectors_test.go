package wire_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/wire"
)

// vector is a payload as an engine sends it, and its decoded form.
type vector struct {
	Name    string
	File    string
	Status  string
	Error   string
	Expect  any
	payload []byte
}

func readVectors(tb testing.TB) []vector {
	tb.Helper()
	dir := filepath.Join("testdata", "vectors")
	b, err := os.ReadFile(filepath.Join(dir, "index.json"))
	if err != nil {
		tb.Fatal(err)
	}
	var index struct{ Vectors []vector }
	if err := json.Unmarshal(b, &index); err != nil {
		tb.Fatal(err)
	}
	for k := range index.Vectors {
		v := &index.Vectors[k]
		if v.payload, err = os.ReadFile(filepath.Join(dir, v.File)); err != nil {
			tb.Fatal(err)
		}
	}
	return index.Vectors
}

// TestVectors decodes each vector with a new decoder, and then all vectors with one decoder, in
// both orders: reused memory must not affect the result.
func TestVectors(t *testing.T) {
	vectors := readVectors(t)
	if len(vectors) < 57 {
		t.Fatalf("%d vectors, want 57", len(vectors))
	}
	for _, v := range vectors {
		t.Run(v.Name, func(t *testing.T) { checkVector(t, &wire.Decoder{}, v) })
	}
	var shared wire.Decoder
	for _, v := range vectors {
		checkVector(t, &shared, v)
	}
	for k := len(vectors) - 1; k >= 0; k-- {
		checkVector(t, &shared, vectors[k])
	}
}

func checkVector(t *testing.T, d *wire.Decoder, v vector) {
	t.Helper()
	b, err := d.Decode(v.payload)
	if v.Error != "" {
		var e wire.Error
		if !errors.As(err, &e) || e.Name() != v.Error {
			t.Errorf("%s: error %v, want %s", v.Name, err, v.Error)
		}
		return
	}
	if err != nil {
		t.Errorf("%s: %v", v.Name, err)
		return
	}
	var got any
	if err := json.Unmarshal(b.AppendJSON(nil), &got); err != nil {
		t.Errorf("%s: %v in %s", v.Name, err, b.AppendJSON(nil))
		return
	}
	if diff := cmp.Diff(v.Expect, got); diff != "" {
		t.Errorf("%s: batch differs (-want +got):\n%s", v.Name, diff)
	}
}
