package jetstream_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
)

const positionName = "kvcast.position"

// history has the contents of each position that a journal has shown.
type history map[string]string

// extend appends n entries with contents that no other call appends, and checks that no position has had other contents.
func (h history) extend(t *testing.T, j *jetstream.Journal, n int) {
	t.Helper()
	source, call := &journal.Source{Worker: "w"}, len(h)
	for i := range n {
		body := fmt.Appendf(nil, "%d of call %d %0300d", i, call, 0)
		p, err := j.Append(t.Context(), journal.Record{Source: source, Body: body})
		if err != nil {
			t.Fatal(err)
		}
		seq, err := p.Wait(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		h.record(t, j, seq, body)
	}
}

func (h history) record(t *testing.T, j *jetstream.Journal, seq uint64, body []byte) {
	t.Helper()
	position := fmt.Sprintf("%s, %d", j.Bounds().Epoch, seq)
	if was, ok := h[position]; ok && was != string(body) {
		t.Fatalf("position %s has the contents %.20q after %.20q", position, body, was)
	}
	h[position] = string(body)
}

// load opens a journal, checks that its entries have the positions that they have had, and discards what cannot be read.
func (h history) load(t *testing.T, cfg jetstream.Config) (j *jetstream.Journal, left int) {
	t.Helper()
	j = open(t, cfg)
	err := j.Load(t.Context(), 0, func(e jetstream.Entry) error {
		h.record(t, j, e.Seq, e.Body)
		left++
		return nil
	})
	if err != nil {
		left = 0
		if err := j.Discard(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	return j, left
}

// loseNewest takes the newest 3,000 bytes of the entries' files.
func loseNewest(t *testing.T, dir string) {
	t.Helper()
	names := blocks(t, dir)
	last := names[len(names)-1]
	info, err := os.Stat(last)
	if err == nil {
		err = os.Truncate(last, info.Size()-3000)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestDamagedPositionBeginsAnEpoch damages the record of the entries that must be there, and loses the newest of these.
func TestDamagedPositionBeginsAnEpoch(t *testing.T) {
	t.Parallel()
	damages := map[string]func(b []byte) []byte{
		"emptied":          func([]byte) []byte { return nil },
		"zeroed":           func(b []byte) []byte { return make([]byte, len(b)) },
		"cut":              func(b []byte) []byte { return b[:len(b)-8] },
		"longer":           func(b []byte) []byte { return append(b, 0) },
		"second half zero": func(b []byte) []byte { return append(b[:len(b)/2:len(b)/2], make([]byte, len(b)-len(b)/2)...) },
		"all ones":         func(b []byte) []byte { return bytes.Repeat([]byte{0xff}, len(b)) },
		"of format 1":      func([]byte) []byte { return []byte{10, 15: 0} },
		"deleted":          nil,
	}
	for name, damage := range damages {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, lines := t.TempDir(), &logLines{}
			h := history{}
			j, _ := h.load(t, config(dir))
			h.extend(t, j, 100)
			was := j.Bounds()
			mustClose(t, j)
			name := filepath.Join(dir, positionName)
			b, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if damage == nil {
				err = os.Remove(name)
			} else {
				err = os.WriteFile(name, damage(b), 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			loseNewest(t, dir)
			cfg := config(dir)
			cfg.Log = lines.logger()
			j, left := h.load(t, cfg)
			h.extend(t, j, 20)
			b1 := j.Bounds()
			if b1.Epoch == was.Epoch || left == 0 || !lines.contains(name) {
				t.Errorf("got %+v with %d entries after %+v, want a new epoch with the entries that are left; log %q", b1, left, was, lines.lines)
			}
			mustClose(t, j)
			j, _ = h.load(t, config(dir))
			if b2 := j.Bounds(); b2 != b1 {
				t.Errorf("after another restart: got %+v, want %+v", b2, b1)
			}
		})
	}
}

// TestRestoredDirectoryBeginsAnEpoch restores an older copy of a journal's directory.
func TestRestoredDirectoryBeginsAnEpoch(t *testing.T) {
	t.Parallel()
	run := func(t *testing.T, args ...string) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	// over replaces the contents of files that exist, and so keeps the files themselves.
	over := func(t *testing.T, backup, dir string) { run(t, "cp", "-a", backup+"/.", dir) }
	for _, tt := range []struct {
		name    string
		running bool // the copy is made while the journal is open
		copied  func(t *testing.T, dir, backup string)
		restore func(t *testing.T, backup, dir string)
	}{
		{name: "by renaming", restore: func(t *testing.T, backup, dir string) {
			if err := os.Rename(dir, dir+"-newer"); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(backup, dir); err != nil {
				t.Fatal(err)
			}
		}},
		{name: "by copying", restore: func(t *testing.T, backup, dir string) {
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
			run(t, "cp", "-a", backup, dir)
		}},
		{name: "over what there is", restore: over},
		{name: "over what there is, copied from a running journal", running: true, restore: over},
		{name: "of links", copied: func(t *testing.T, dir, backup string) {
			if err := os.Remove(filepath.Join(backup, positionName)); err != nil {
				t.Fatal(err)
			}
			if err := os.Link(filepath.Join(dir, positionName), filepath.Join(backup, positionName)); err != nil {
				t.Fatal(err)
			}
		}, restore: func(t *testing.T, backup, dir string) {
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(backup, dir); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "journal")
			backup := dir + "-backup"
			h := history{}
			j, _ := h.load(t, config(dir))
			h.extend(t, j, 100)
			if !tt.running {
				mustClose(t, j)
			}
			run(t, "cp", "-a", dir, backup)
			if tt.copied != nil {
				tt.copied(t, dir, backup)
			}
			if !tt.running {
				j, _ = h.load(t, config(dir))
			}
			h.extend(t, j, 30)
			was := j.Bounds()
			mustClose(t, j)
			tt.restore(t, backup, dir)
			j, _ = h.load(t, config(dir))
			if b := j.Bounds(); b.Epoch == was.Epoch {
				t.Errorf("got %+v after %+v, want a new epoch", b, was)
			}
			h.extend(t, j, 50)
		})
	}
}
