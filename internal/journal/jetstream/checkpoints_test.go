package jetstream_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
)

// checkpoints returns the names, lengths and last bytes of all checkpoints, and the errors.
func checkpoints(t *testing.T, j *jetstream.Journal) (map[string]string, []error) {
	t.Helper()
	return objects(j.Checkpoints().All(t.Context()), func(data []byte) string {
		return fmt.Sprintf("%d %q", len(data), data[max(0, len(data)-3):])
	})
}

func put(t *testing.T, j *jetstream.Journal, name string, data []byte) {
	t.Helper()
	if err := j.Checkpoints().Put(t.Context(), name, data); err != nil {
		t.Fatal(err)
	}
}

func wantCheckpoints(t *testing.T, j *jetstream.Journal, want map[string]string) {
	t.Helper()
	got, errs := checkpoints(t, j)
	wantObjects(t, got, errs, want)
}

func TestCheckpointsSurvive(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	j, _ := load(t, config(dir))
	want := make(map[string]string)
	for i, name := range []string{"", "%", "w", "w.*> \x00\xff/", strings.Repeat("n", 300)} {
		for _, n := range []int{3, 1<<20 + i} { // the second replaces the first
			data := append(bytes.Repeat([]byte{byte(i)}, n), "end"...)
			put(t, j, name, data)
			want[name] = fmt.Sprintf("%d %q", len(data), "end")
		}
	}
	put(t, j, "empty", nil)
	want["empty"] = `0 ""`
	wantCheckpoints(t, j, want)
	put(t, j, "deleted", make([]byte, 1<<20))
	for range 2 {
		if err := j.Checkpoints().Delete(t.Context(), "deleted"); err != nil {
			t.Fatal(err)
		}
	}
	crashed := copyDir(t, dir)
	mustClose(t, j)
	for _, dir := range []string{dir, crashed} {
		j := open(t, config(dir))
		wantCheckpoints(t, j, want)
		mustClose(t, j)
	}
	if got := chunks(t, dir); got != 5*5 {
		t.Errorf("got %d chunks, want 5 a checkpoint", got)
	}
}

// chunks returns the number of stored chunks.
func chunks(t *testing.T, dir string) int {
	t.Helper()
	n := 0
	administerDir(t, dir, func(js natsjs.JetStream) {
		s, err := js.Stream(t.Context(), "OBJ_kvcast-checkpoints")
		if err != nil {
			t.Fatal(err)
		}
		info, err := s.Info(t.Context(), natsjs.WithSubjectFilter("$O.kvcast-checkpoints.C.>"))
		if err != nil {
			t.Fatal(err)
		}
		for subject := range maps.Keys(info.State.Subjects) {
			n += int(info.State.Subjects[subject])
		}
	})
	return n
}

// TestInterruptedCheckpointKeepsTheOldOne crashes after each message of a checkpoint's replacement.
func TestInterruptedCheckpointKeepsTheOldOne(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	j, _ := load(t, config(dir))
	put(t, j, "w", []byte("old"))
	mustClose(t, j)
	old := map[string]string{"w": `3 "old"`}
	for _, limit := range []int64{2, 3, 4, 5} { // the old one has 2 messages, a chunk and a description
		at := copyDir(t, dir)
		administerDir(t, at, func(js natsjs.JetStream) {
			update(t, js, "OBJ_kvcast-checkpoints", func(c *natsjs.StreamConfig) { c.MaxMsgs = limit })
		})
		j, _ := load(t, config(at))
		if err := j.Checkpoints().Put(t.Context(), "w", make([]byte, 600<<10)); !errors.Is(err, journal.ErrNoSpace) {
			t.Errorf("put with room for %d messages: got %v, want ErrNoSpace", limit-2, err)
		}
		wantCheckpoints(t, j, old)
		mustClose(t, j)
	}
	// Chunks without a description, which a crash leaves, are removed.
	administerDir(t, dir, func(js natsjs.JetStream) {
		for range 3 {
			if _, err := js.Publish(t.Context(), "$O.kvcast-checkpoints.C.interrupted", []byte("data")); err != nil {
				t.Fatal(err)
			}
		}
	})
	j, _ = load(t, config(dir))
	wantCheckpoints(t, j, old)
	mustClose(t, j)
	if got := chunks(t, dir); got != 1 {
		t.Errorf("got %d chunks, want 1", got)
	}
	j, _ = load(t, config(dir))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := j.Checkpoints().Put(ctx, "w", []byte("new")); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled put: got %v", err)
	}
	wantCheckpoints(t, j, old)
}

func TestCorruptCheckpointIsNamed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	j, _ := load(t, config(dir))
	put(t, j, "good", []byte("good"))
	for _, name := range []string{"changed", "short", "undecodable"} {
		put(t, j, name, bytes.Repeat([]byte(name), 100_000))
	}
	mustClose(t, j)
	administerDir(t, dir, func(js natsjs.JetStream) {
		store, err := js.ObjectStore(t.Context(), "kvcast-checkpoints")
		if err != nil {
			t.Fatal(err)
		}
		s, err := js.Stream(t.Context(), "OBJ_kvcast-checkpoints")
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"changed", "short"} {
			info, err := store.GetInfo(t.Context(), name)
			if err != nil {
				t.Fatal(err)
			}
			chunk := "$O.kvcast-checkpoints.C." + info.NUID
			last, err := s.GetLastMsgForSubject(t.Context(), chunk)
			if err != nil {
				t.Fatal(err)
			}
			if err := s.DeleteMsg(t.Context(), last.Sequence); err != nil {
				t.Fatal(err)
			}
			if last.Data[0]++; name == "changed" {
				if _, err := js.Publish(t.Context(), chunk, last.Data); err != nil {
					t.Fatal(err)
				}
			}
		}
		if _, err := js.Publish(t.Context(), "$O.kvcast-checkpoints.M.dW5kZWNvZGFibGU=", []byte("{")); err != nil {
			t.Fatal(err)
		}
	})
	j, _ = load(t, config(dir))
	got, errs := checkpoints(t, j)
	if diff := cmp.Diff(map[string]string{"good": `4 "ood"`}, got); diff != "" || len(errs) != 3 {
		t.Errorf("checkpoints (-want +got):\n%s\nerrors: %v", diff, errs)
	}
	for _, name := range []string{"changed", "short", "undecodable"} {
		if all := errors.Join(errs...).Error(); !strings.Contains(all, fmt.Sprintf("read checkpoint %q: ", name)) {
			t.Errorf("no error for %q: %v", name, all)
		}
		put(t, j, name, []byte("new"))
	}
	wantCheckpoints(t, j, map[string]string{"good": `4 "ood"`, "changed": `3 "new"`, "short": `3 "new"`, "undecodable": `3 "new"`})
}

// TestCheckpointThatAnOperatorDeletesIsGone deletes an object as nats object rm does.
func TestCheckpointThatAnOperatorDeletesIsGone(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	j, _ := load(t, config(dir))
	put(t, j, "kept", []byte("kept"))
	put(t, j, "deleted", []byte("deleted"))
	mustClose(t, j)
	administerDir(t, dir, func(js natsjs.JetStream) {
		store, err := js.ObjectStore(t.Context(), "kvcast-checkpoints")
		if err == nil {
			err = store.Delete(t.Context(), "deleted")
		}
		if err != nil {
			t.Fatal(err)
		}
	})
	j, _ = load(t, config(dir))
	wantCheckpoints(t, j, map[string]string{"kept": `4 "ept"`})
	if data, err := j.Checkpoints().Get(t.Context(), "deleted"); data != nil || err != nil {
		t.Errorf("get: got %q, %v; want nothing", data, err)
	}
	put(t, j, "deleted", []byte("new"))
	wantCheckpoints(t, j, map[string]string{"kept": `4 "ept"`, "deleted": `3 "new"`})
}

// TestStuckServerFailsTheJournal has an embedded server that stores no checkpoint in time, once and then twice in a row.
func TestStuckServerFailsTheJournal(t *testing.T) {
	j, _ := load(t, config(t.TempDir()))
	timeOut := func() {
		t.Helper()
		defer jetstream.SetCheckpointTimeout(0)()
		if err := j.Checkpoints().Put(t.Context(), "w", nil); err == nil {
			t.Error("a checkpoint was written in no time")
		}
	}
	timeOut()
	put(t, j, "w", nil)
	timeOut()
	if err := j.Err(); err != nil {
		t.Fatalf("after one timeout in a row: %v", err)
	}
	timeOut()
	if err := j.Err(); err == nil || !strings.Contains(err.Error(), "has stored no checkpoint") {
		t.Errorf("after two timeouts in a row: got %v", err)
	}
}
