package jetstream_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/internal/journal/journaltest"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

func TestEpochChangesWhenTheMachineHasBooted(t *testing.T) {
	t.Parallel()
	for _, always := range []bool{false, true} {
		t.Run("sync always "+strconv.FormatBool(always), func(t *testing.T) {
			dir, lines := t.TempDir(), &logLines{}
			cfg := config(dir)
			cfg.SyncAlways, cfg.Log = always, lines.logger()
			j, _ := load(t, cfg)
			want := appendN(t, j, "w", 10)
			was := j.Bounds()
			mustClose(t, j)
			administerDir(t, dir, func(js natsjs.JetStream) {
				update(t, js, jetstream.DefaultStream, func(c *natsjs.StreamConfig) { c.Metadata["kvcast.boot_id"] = "another" })
			})
			j, got := load(t, cfg)
			wantEntries(t, got, want)
			b := j.Bounds()
			if changed := b.Epoch != was.Epoch; changed == always || b.Newest != was.Newest {
				t.Errorf("got %+v after %+v", b, was)
			}
			if lines.contains("The machine has booted") == always {
				t.Errorf("log: %q", lines.lines)
			}
			mustClose(t, j)
			j, _ = load(t, cfg)
			if got := j.Bounds(); got != b {
				t.Errorf("bounds after another restart: got %+v, want %+v", got, b)
			}
		})
	}
}

// TestEpochContinuesAfterABootOnlyIfAllEntriesWereSynced opens a journal with different settings before the machine boots.
func TestEpochContinuesAfterABootOnlyIfAllEntriesWereSynced(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name      string
		always    []bool // of each run before the machine boots, and of the one after it
		continues bool
	}{
		{"always", []bool{true, true, true}, true},
		{"never again", []bool{true, true, false}, true},
		{"not yet", []bool{false, false, true}, false},
		{"from the second run on", []bool{false, true, true}, false},
		{"but for the last run", []bool{true, false, true}, false},
		{"but for a run between", []bool{true, false, true, true}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			cfg := config(dir)
			last := len(tt.always) - 1
			var was journal.Bounds
			for _, cfg.SyncAlways = range tt.always[:last] {
				j, _ := load(t, cfg)
				appendN(t, j, "w", 1)
				was = j.Bounds()
				mustClose(t, j)
			}
			for range 2 {
				administerDir(t, dir, func(js natsjs.JetStream) {
					update(t, js, jetstream.DefaultStream, func(c *natsjs.StreamConfig) { c.Metadata["kvcast.boot_id"] = "another" })
				})
				cfg.SyncAlways = tt.always[last]
				j, _ := load(t, cfg)
				if got := j.Bounds(); (got.Epoch == was.Epoch) != tt.continues || got.Newest != was.Newest {
					t.Errorf("got %+v after %+v; want the same epoch: %t", got, was, tt.continues)
				}
				was = j.Bounds()
				mustClose(t, j)
				tt.continues = cfg.SyncAlways // all entries since the last boot
			}
		})
	}
}

func TestStreamLimitIsNoSpace(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	mustClose(t, open(t, config(dir)))
	administerDir(t, dir, func(js natsjs.JetStream) {
		update(t, js, jetstream.DefaultStream, func(c *natsjs.StreamConfig) { c.MaxBytes = 10_000 })
	})
	j, _ := load(t, config(dir))
	stored := wantFailure(t, j, journal.ErrNoSpace, `stream "kvcast" of `+dir, "max_bytes 10000")
	if stored == 0 || j.Bounds().Newest != uint64(stored) {
		t.Errorf("newest: got %d, want %d", j.Bounds().Newest, stored)
	}
	mustClose(t, j)
	administerDir(t, dir, func(js natsjs.JetStream) {
		update(t, js, jetstream.DefaultStream, func(c *natsjs.StreamConfig) { c.MaxBytes = -1 })
	})
	j, got := load(t, config(dir))
	if len(got) != stored {
		t.Errorf("after a restart: got %d entries, want %d", len(got), stored)
	}
	appendN(t, j, "w", 100)
}

// TestCauseOfARefusalAmongMany appends 300 entries without waiting, so that most have no answer of their own. The stream refuses one of them.
func TestCauseOfARefusalAmongMany(t *testing.T) {
	t.Parallel()
	const before = 200
	dir := t.TempDir()
	mustClose(t, open(t, config(dir)))
	administerDir(t, dir, func(js natsjs.JetStream) {
		update(t, js, jetstream.DefaultStream, func(c *natsjs.StreamConfig) { c.MaxMsgSize = 1000 })
	})
	j, _ := load(t, config(dir))
	source := sourceOf(t, j, "w")
	var pending []journal.Pending
	for i := range before + 100 {
		size := 10
		if i == before {
			size = 2000
		}
		p, err := j.Append(t.Context(), journal.Record{Source: source, Body: make([]byte, size)})
		if err != nil {
			break
		}
		pending = append(pending, p)
	}
	for i, p := range pending {
		seq, err := p.Wait(t.Context())
		switch {
		case i < before && (err != nil || seq != uint64(i+1)):
			t.Fatalf("append %d: got %d, %v", i, seq, err)
		case i >= before && (!errors.Is(err, journal.ErrNoSpace) || !strings.Contains(err.Error(), fmt.Sprintf("append entry %d: ", before+1)) ||
			!strings.Contains(err.Error(), "max_msg_size 1000")):
			t.Fatalf("append %d: got %v, want ErrNoSpace that names entry %d and the limit", i, err, before+1)
		}
	}
	mustClose(t, j)
	if _, got := load(t, config(dir)); len(got) != before {
		t.Errorf("after a restart: got %d entries, want %d", len(got), before)
	}
}

// wantFailure appends until the journal fails with err and a text that has all parts, and returns the number of
// acknowledged entries. All later appends must fail with the same error.
func wantFailure(t *testing.T, j *jetstream.Journal, want error, parts ...string) (acknowledged int) {
	t.Helper()
	var first error
	pause := time.NewTicker(50 * time.Millisecond) // a failure can take seconds
	defer pause.Stop()
	for i := 0; first == nil && i < 100_000; i++ {
		<-pause.C
		r := journaltest.Record(i, 300)
		if j.IsShared() {
			r.Source = sourceOf(t, j, "w")
		}
		p, err := j.Append(t.Context(), r)
		if err == nil {
			_, err = p.Wait(t.Context())
		}
		if first = err; err == nil {
			acknowledged++
		}
	}
	if !errors.Is(first, want) {
		t.Fatalf("append: got %v, want %v", first, want)
	}
	for _, part := range parts {
		if !strings.Contains(first.Error(), part) {
			t.Errorf("append: got %q, want %q in it", first, part)
		}
	}
	if _, err := j.Append(t.Context(), journaltest.Record(1, 1)); !errors.Is(err, first) && err.Error() != first.Error() {
		t.Errorf("next append: got %v, want %v", err, first)
	}
	if err := j.Err(); !errors.Is(err, want) {
		t.Errorf("Err: got %v, want %v", err, want)
	}
	return acknowledged
}

// loadError returns the error of Load.
func loadError(t *testing.T, j *jetstream.Journal) error {
	t.Helper()
	return j.Load(t.Context(), 0, func(jetstream.Entry) error { return nil })
}

// TestLoadNeedsWhatACheckpointHasSeen loads a stream that is too short, twice: a failed Load must not begin to follow it.
func TestLoadNeedsWhatACheckpointHasSeen(t *testing.T) {
	t.Parallel()
	cfg := jetstream.Config{Stream: "s", Servers: []string{natstest.Start(t)}, Instance: "a"}
	j := open(t, cfg)
	for range 2 {
		err := j.Load(t.Context(), 1, func(jetstream.Entry) error { return nil })
		if !errors.Is(err, jetstream.ErrUnreadable) || !strings.Contains(err.Error(), "a checkpoint has seen entry 1, and the newest is 0") {
			t.Errorf("got %v, want an ErrUnreadable", err)
		}
	}
	if err := loadError(t, j); err != nil {
		t.Error(err)
	}
}

func TestLostEntriesAreUnreadableUntilDiscard(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		damage func(t *testing.T, js natsjs.JetStream, s natsjs.Stream)
		want   string
	}{
		{"hole", func(t *testing.T, _ natsjs.JetStream, s natsjs.Stream) {
			purge(t, s, natsjs.WithPurgeSubject("kvcast.kvcast.b"))
		}, "entry 6 is missing, and 11 follows"},
		{"newest", func(t *testing.T, _ natsjs.JetStream, s natsjs.Stream) {
			purge(t, s, natsjs.WithPurgeSubject("kvcast.kvcast.c"))
		}, "entry 11"},
		{"oldest", func(t *testing.T, _ natsjs.JetStream, s natsjs.Stream) { purge(t, s, natsjs.WithPurgeSequence(4)) },
			"the oldest entries, 1 to 3, are lost"},
		{"undecodable", func(t *testing.T, js natsjs.JetStream, _ natsjs.Stream) {
			if _, err := js.Publish(t.Context(), "kvcast.kvcast.%zz", nil); err != nil {
				t.Fatal(err)
			}
		}, `subject "kvcast.kvcast.%zz"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			j, _ := load(t, config(dir))
			for _, worker := range []string{"a", "b", "c"} {
				appendN(t, j, worker, 5)
			}
			if err := j.Checkpoints().Put(t.Context(), "a", []byte("data")); err != nil {
				t.Fatal(err)
			}
			was := j.Bounds()
			mustClose(t, j)
			administerDir(t, dir, func(js natsjs.JetStream) {
				s, err := js.Stream(t.Context(), jetstream.DefaultStream)
				if err != nil {
					t.Fatal(err)
				}
				tt.damage(t, js, s)
			})
			for range 2 {
				j = open(t, config(dir))
				if err := loadError(t, j); !errors.Is(err, jetstream.ErrUnreadable) || !strings.Contains(err.Error(), tt.want) {
					t.Fatalf("load: got %v, want an ErrUnreadable with %q", err, tt.want)
				}
				mustClose(t, j)
			}
			j = open(t, config(dir))
			if err := loadError(t, j); err == nil {
				t.Fatal("load succeeds")
			}
			if err := j.Discard(t.Context()); err != nil {
				t.Fatal(err)
			}
			b := j.Bounds()
			if b.Epoch == was.Epoch || b.Newest < was.Newest || b.Oldest != b.Newest+1 {
				t.Errorf("bounds after Discard: got %+v after %+v", b, was)
			}
			for c, err := range j.Checkpoints().All(t.Context()) {
				t.Errorf("checkpoint %q after Discard, error %v", c.Name, err)
			}
			want := appendN(t, j, "a", 5)
			mustClose(t, j)
			j, got := load(t, config(dir))
			wantEntries(t, got, want)
			if got := j.Bounds().Epoch; got != b.Epoch {
				t.Errorf("epoch after a restart: got %s, want %s", got, b.Epoch)
			}
		})
	}
}

func purge(t *testing.T, s natsjs.Stream, opt natsjs.StreamPurgeOpt) {
	t.Helper()
	if err := s.Purge(t.Context(), opt); err != nil {
		t.Fatal(err)
	}
}

func TestUnsuitableStreamIsRefused(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		change func(c *natsjs.StreamConfig)
		want   string
	}{
		{"newer format", func(c *natsjs.StreamConfig) { c.Metadata["kvcast.format"] = "4" }, "has format 4, and this version of kvcast reads up to 3"},
		{"not kvcast's", func(c *natsjs.StreamConfig) { c.Metadata = nil }, "not created by kvcast"},
		{"limits that drop entries", func(c *natsjs.StreamConfig) { c.Discard, c.MaxAge = natsjs.DiscardOld, time.Hour }, "max_age is 1h0m0s, want none"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			mustClose(t, open(t, config(dir)))
			administerDir(t, dir, func(js natsjs.JetStream) { update(t, js, jetstream.DefaultStream, tt.change) })
			if _, err := jetstream.Open(t.Context(), config(dir)); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("open: got %v, want an error with %q", err, tt.want)
			}
		})
	}
}

func TestUnreadableFilesAreMovedAway(t *testing.T) {
	t.Parallel()
	invalid := func(meta string) error { return os.WriteFile(meta, []byte("{"), 0o600) }
	enlarged := func(meta string) error { return os.Truncate(meta, 200<<20) }
	enlargedSum := func(meta string) error {
		return enlarged(filepath.Join(filepath.Dir(meta), "meta.sum")) // nats-server takes half a minute and 10 GB
	}
	for _, tt := range []struct {
		name    string
		stream  string
		damage  func(meta string) error
		entries int // left
	}{
		{"entries", "kvcast", invalid, 0},
		{"checkpoints", "OBJ_kvcast-checkpoints", invalid, 10},
		{"entries, too large", "kvcast", enlarged, 0},
		{"checkpoints, too large", "OBJ_kvcast-checkpoints", enlarged, 10},
		{"a checksum, too large", "kvcast", enlargedSum, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir, lines := t.TempDir(), &logLines{}
			j, _ := load(t, config(dir))
			appendN(t, j, "w", 10)
			was := j.Bounds()
			if err := j.Checkpoints().Put(t.Context(), "w", []byte("data")); err != nil {
				t.Fatal(err)
			}
			mustClose(t, j)
			meta := filepath.Join(dir, "jetstream", "$G", "streams", tt.stream, "meta.inf")
			if err := tt.damage(meta); err != nil {
				t.Fatal(err)
			}
			cfg := config(dir)
			cfg.Log = lines.logger()
			j, got := load(t, cfg)
			if large := strings.HasSuffix(tt.name, "too large"); large != lines.contains("it is too large, and is set aside") {
				t.Errorf("log: %q", lines.lines)
			}
			if b := j.Bounds(); len(got) != tt.entries || (b.Epoch == was.Epoch) != (tt.entries > 0) {
				t.Errorf("got %d entries and %+v after %+v, want %d entries", len(got), b, was, tt.entries)
			}
			for c, err := range j.Checkpoints().All(context.Background()) {
				t.Errorf("checkpoint %q is left, error %v", c.Name, err)
			}
			moved := filepath.Join(dir, "unreadable-1")
			if _, err := os.Stat(moved); err != nil || !lines.contains("moved_to="+moved) {
				t.Errorf("stat: %v, log: %q", err, lines.lines)
			}
			appendN(t, j, "w", 1)
		})
	}
}

// TestServerThatAcknowledgesNothingFailsTheJournal needs a minute without an acknowledgement, seen more than once. The server
// reports that it is healthy.
func TestServerThatAcknowledgesNothingFailsTheJournal(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for _, tt := range []struct {
		ticks int
		since time.Time
		want  bool
	}{
		{10, now.Add(-2 * time.Minute), true},
		{9, now.Add(-2 * time.Minute), false}, // as after a pause of the process
		{10, now, false},
		{10, now.Add(-30 * time.Second), false},
	} {
		err := open(t, config(t.TempDir())).StuckAfter(tt.ticks, tt.since)
		if got := err != nil && strings.Contains(err.Error(), "has acknowledged nothing for"); got != tt.want || err != nil && !got {
			t.Errorf("%d ticks, since %v: got %v", tt.ticks, now.Sub(tt.since), err)
		}
	}
}
