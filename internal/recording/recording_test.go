package recording_test

import (
	"compress/gzip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/recording"
)

func TestRead(t *testing.T) {
	for _, tt := range []struct {
		name string
		text string
		want [][][]byte
		err  string
	}{
		{"nothing", "", nil, ""},
		{"objects", `{"t": 1, "frames": ["6b", "", "90"]}` + "\n" + `{"frames": ["00"]}`, [][][]byte{{[]byte("k"), {}, {0x90}}, {{0}}}, ""},
		{"bare arrays", `["", "ff"]`, [][][]byte{{{}, {0xff}}}, ""},
		{"no frames", `{"t": 1}`, nil, `message 1: want an array of frames`},
		{"frames of another type", `{"frames": 7}`, nil, `message 1: want an array of frames`},
		{"no hexadecimal", `["00"] ["0g"]`, [][][]byte{{{0}}}, `message 2: frame 0: `},
		{"cut off", `["00"`, nil, `message 1: unexpected EOF`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var got [][][]byte
			failure := ""
			for frames, err := range recording.Read(strings.NewReader(tt.text)) {
				if err != nil {
					failure = err.Error()
					continue
				}
				got = append(got, frames)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("messages (-want +got):\n%s", diff)
			}
			if (tt.err == "") != (failure == "") || !strings.HasPrefix(failure, tt.err) {
				t.Errorf("error: got %q, want %q", failure, tt.err)
			}
		})
	}
}

func TestReadFile(t *testing.T) {
	dir := t.TempDir()
	zipped := filepath.Join(dir, "a.jsonl.gz")
	f, err := os.Create(zipped)
	if err != nil {
		t.Fatal(err)
	}
	z := gzip.NewWriter(f)
	if _, err := z.Write([]byte(`["00"]`)); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	for frames, err := range recording.ReadFile(zipped) {
		if err != nil || len(frames) != 1 {
			t.Errorf("got %v, %v", frames, err)
		}
	}
	missing := filepath.Join(dir, "b.jsonl")
	for _, err := range recording.ReadFile(missing) {
		if err == nil || !strings.Contains(err.Error(), missing) {
			t.Errorf("a missing file: got error %v, want its name", err)
		}
	}
	if !recording.IsName(zipped) || !recording.IsName(missing) || recording.IsName("a.msgpack") {
		t.Error("IsName accepts or rejects the wrong names")
	}
}
