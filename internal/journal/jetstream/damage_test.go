package jetstream_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/internal/journal/journaltest"
)

// blocks returns the files of a journal's entries, oldest first.
func blocks(t *testing.T, dir string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "jetstream", "$G", "streams", "kvcast", "msgs", "*.blk"))
	if err != nil || len(names) == 0 {
		t.Fatalf("got files %q, %v", names, err)
	}
	slices.SortFunc(names, func(a, b string) int { return len(a) - len(b) })
	return names
}

// TestDamagedFilesAreUnreadableUntilDiscard damages files of entries after a clean stop and after a crash. nats-server
// either truncates the file when it starts, or finds the damage when it reads the entry.
func TestDamagedFilesAreUnreadableUntilDiscard(t *testing.T) {
	for name, end := range map[string]func(t testing.TB, j *jetstream.Journal, dir string) string{
		"stopped": func(t testing.TB, j *jetstream.Journal, dir string) string { mustClose(t, j); return dir },
		"crashed": func(t testing.TB, _ *jetstream.Journal, dir string) string { return crash(t, dir) },
	} {
		for _, tt := range []struct {
			name   string
			file   int // 0 is the oldest, 1 the newest
			damage func(b []byte) []byte
		}{
			{"a changed byte in the oldest file", 0, changeAt(1, 2)},
			{"a changed byte in the oldest entry", 0, changeAt(0, 2)},
			{"a changed seq in the oldest file", 0, changeSeq},
			{"a changed byte in the newest file", 1, changeAt(1, 2)},
			{"a changed byte in the newest entry", 1, func(b []byte) []byte { b[len(b)-1000]++; return b }},
			{"a torn newest entry", 1, func(b []byte) []byte { return b[:len(b)-1000] }},
			{"an empty oldest file", 0, func([]byte) []byte { return nil }},
			{"an empty newest file", 1, func([]byte) []byte { return nil }},
		} {
			t.Run(name+", "+tt.name, func(t *testing.T) {
				dir := t.TempDir()
				j, _ := load(t, config(dir))
				source := &journal.Source{Worker: "w"}
				for range 24 { // two files, of at most 8 MiB
					p, err := j.Append(t.Context(), journal.Record{Source: source, Body: make([]byte, 400<<10)})
					if err == nil {
						_, err = p.Wait(t.Context())
					}
					if err != nil {
						t.Fatal(err)
					}
				}
				was := j.Bounds()
				at := end(t, j, dir)
				names := blocks(t, at)
				if len(names) != 2 {
					t.Fatalf("got %d files, want 2", len(names))
				}
				file := names[tt.file]
				b, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(file, tt.damage(b), 0o600); err != nil {
					t.Fatal(err)
				}
				before := allocated()
				j = open(t, config(at))
				if err := loadError(t, j); !errors.Is(err, jetstream.ErrUnreadable) {
					t.Fatalf("load: got %v, want ErrUnreadable", err)
				} else {
					t.Log(err)
				}
				if n := allocated() - before; n > 512<<20 { // nats-server may take a damaged seq for a gap of as many messages
					t.Errorf("load: %d bytes were allocated", n)
				}
				if err := j.Discard(t.Context()); err != nil {
					t.Fatal(err)
				}
				want := appendN(t, j, "w", 10)
				mustClose(t, j)
				j, got := load(t, config(at))
				wantEntries(t, got, want)
				if b := j.Bounds(); b.Epoch == was.Epoch {
					t.Errorf("bounds after Discard: got %+v after %+v", b, was)
				}
				mustClose(t, j)
			})
		}
	}
}

// allocated returns the bytes that the process has allocated so far.
func allocated() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.TotalAlloc
}

// changeAt changes a byte at a fraction of the data, after 100 bytes.
func changeAt(numerator, denominator int) func(b []byte) []byte {
	return func(b []byte) []byte { b[100+(len(b)-200)*numerator/denominator]++; return b }
}

// changeSeq adds 2^26 to the seq of the second message of a file.
func changeSeq(b []byte) []byte {
	subject := []byte("kvcast.kvcast.w")
	second := bytes.Index(b, subject) + len(subject)
	second += bytes.Index(b[second:], subject)
	const header, seq = 22, 4 // of the message: its length, and where it has the seq
	b[second-header+seq+3] += 4
	return b
}

// TestFullDiskIsNoSpace runs itself in a process whose files may have 256 KiB.
func TestFullDiskIsNoSpace(t *testing.T) {
	const variable = "KVCAST_TEST_FULL_DIR"
	for name, fill := range map[string]func(t *testing.T, dir string, j *jetstream.Journal) (appended int){
		"entries": func(t *testing.T, dir string, j *jetstream.Journal) int {
			return wantFailure(t, j, journal.ErrNoSpace, `"kvcast"`, dir, "file too large")
		},
		"batches": func(t *testing.T, _ string, j *jetstream.Journal) (acknowledged int) {
			for first := error(nil); ; {
				var pending []journal.Pending
				for i := range 400 {
					p, err := j.Append(t.Context(), journaltest.Record(i, 2000))
					if err == nil {
						pending = append(pending, p)
					} else if first == nil {
						first = err
					}
				}
				for _, p := range pending {
					if _, err := p.Wait(t.Context()); err == nil {
						acknowledged++
					} else if first == nil {
						first = err
					}
				}
				if first == nil {
					continue
				}
				if !errors.Is(first, journal.ErrNoSpace) || !strings.Contains(first.Error(), "file too large") {
					t.Errorf("append: got %v, want ErrNoSpace with the cause", first)
				}
				return acknowledged
			}
		},
		"checkpoints": func(t *testing.T, dir string, j *jetstream.Journal) int {
			err := j.Checkpoints().Put(t.Context(), "c", make([]byte, 600<<10))
			if !errors.Is(err, journal.ErrNoSpace) || !strings.Contains(err.Error(), "kvcast-checkpoints") {
				t.Errorf("write a checkpoint: got %v, want ErrNoSpace that names the stream", err)
			}
			return wantFailure(t, j, journal.ErrNoSpace, "kvcast-checkpoints", dir, "file too large")
		},
	} {
		t.Run(name, func(t *testing.T) {
			if dir := os.Getenv(variable); dir != "" {
				signal.Ignore(syscall.SIGXFSZ)
				cfg := config(dir)
				cfg.SyncAlways = name == "batches"
				j, _ := load(t, cfg)
				appendN(t, j, "w", 10)
				if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 256 << 10, Max: 256 << 10}); err != nil {
					t.Fatal(err)
				}
				appended := fill(t, dir, j)
				if got := j.Bounds().Newest; got != uint64(10+appended) {
					t.Errorf("newest: got %d, want %d", got, 10+appended)
				}
				return
			}
			dir := t.TempDir()
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestFullDiskIsNoSpace$/^"+name+"$", "-test.timeout=2m")
			cmd.Env = append(os.Environ(), variable+"="+dir)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("process with small files: %v\n%s", err, out)
			}
			j, got := load(t, config(dir))
			if len(got) < 10 {
				t.Errorf("got %d entries, want what was acknowledged", len(got))
			}
			appendN(t, j, "w", 10)
			if err := j.Checkpoints().Put(t.Context(), "c", make([]byte, 600<<10)); err != nil {
				t.Errorf("write a checkpoint with room: %v", err)
			}
		})
	}
}
