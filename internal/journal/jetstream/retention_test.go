package jetstream_test

import (
	"context"
	"errors"
	"math"
	"runtime"
	"slices"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/internal/journal/journaltest"
)

func TestStreamKeepsWhatTheMirrorAndRecoveryNeed(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	cfg := serverConfig(s.ClientURL())
	cfg.Retention.MaxBytes = 64 << 10
	j, _ := load(t, cfg)
	want := appendN(t, j, "w", 1000)
	for j.Retain(1); j.Owner("w").Seq == 1; { // it is renewed first
		runtime.Gosched()
	}
	was := j.Bounds()
	if was.Oldest < 500 {
		t.Fatalf("bounds: got %+v, want entries evicted", was)
	}
	for _, tt := range []struct{ retain, first uint64 }{
		{100, 101},
		{50, 101}, // what is removed stays away
		{was.Oldest - 2, was.Oldest - 1},
		{math.MaxUint64, was.Oldest},
	} {
		j.Retain(tt.retain)
		awaitFirst(t, s, tt.first)
	}
	mustClose(t, j)
	j, got := load(t, cfg)
	// Records of the owner are between the entries.
	first := slices.IndexFunc(want, func(e jetstream.Entry) bool { return e.Seq >= was.Oldest })
	wantEntries(t, got, want[first:])
	if b := j.Bounds(); b.Epoch != was.Epoch || b.Oldest != was.Oldest || b.Newest-was.Newest > 1 { // the owner's record may be renewed again
		t.Errorf("bounds after a restart: got %+v, want %+v, or one entry more", b, was)
	}
}

func TestEmptyStreamContinues(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := startServer(t, dir, 0)
	cfg := serverConfig(s.ClientURL())
	cfg.Retention.MaxAge = 1
	newest := uint64(0)
	for range 3 {
		j, got := load(t, cfg)
		if b := j.Bounds(); len(got) != 0 || b.Newest != newest || b.Oldest != newest+1 {
			t.Fatalf("got %d entries and %+v, want newest %d", len(got), b, newest)
		}
		appendN(t, j, "w", 10)
		if _, err := j.Release(t.Context(), "w", ""); err != nil {
			t.Fatal(err)
		}
		// The entries, the owner's record, which is written again when the stream would otherwise lose it, and that it is released.
		administer(t, s, func(js natsjs.JetStream) {
			stream, err := js.Stream(t.Context(), jetstream.DefaultStream)
			if err != nil {
				t.Fatal(err)
			}
			last := stream.CachedInfo().State.LastSeq
			if last < newest+12 {
				t.Fatalf("the newest entry is %d, want at least %d", last, newest+12)
			}
			newest = last
		})
		j.Retain(math.MaxUint64)
		awaitFirst(t, s, newest+1)
		mustClose(t, j)
		crashed := startServer(t, copyDir(t, dir), 0)
		j, got = load(t, serverConfig(crashed.ClientURL()))
		if b := j.Bounds(); len(got) != 0 || b.Newest != newest {
			t.Errorf("after a crash: got %d entries and %+v, want newest %d", len(got), b, newest)
		}
	}
}

// awaitFirst waits until a seq is the first that the stream has, or the next if it is empty.
func awaitFirst(t *testing.T, s *server.Server, want uint64) {
	t.Helper()
	administer(t, s, func(js natsjs.JetStream) {
		for first := uint64(0); first != want; {
			stream, err := js.Stream(t.Context(), jetstream.DefaultStream)
			if err != nil {
				t.Fatal(err)
			}
			if first = stream.CachedInfo().State.FirstSeq; first > want {
				t.Fatalf("the first entry is %d, want %d", first, want)
			}
		}
	})
}

func TestPinnedEntriesMakeAppendsWait(t *testing.T) {
	t.Parallel()
	cfg := config(t.TempDir())
	cfg.Retention.MaxBytes, cfg.InFlight = 16<<10, 4
	j, _ := load(t, cfg)
	j.Pin(0)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var pending journal.Pending
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			p, err := j.Append(ctx, journaltest.Record(i, 300))
			if err != nil {
				if !errors.Is(err, context.Canceled) {
					t.Errorf("append: %v", err)
				}
				return
			}
			pending = p
		}
	}()
	for oldest := uint64(1); j.Bounds().Newest < 300; {
		b := j.Bounds()
		if b.Oldest > oldest {
			t.Fatalf("bounds: got %+v, want entry %d retained", b, oldest)
		}
		oldest = b.Newest + 1
		j.Pin(b.Newest)
	}
	j.Pin(math.MaxUint64)
	cancel()
	<-done
	if _, err := pending.Wait(t.Context()); err != nil {
		t.Errorf("wait: %v", err)
	}
}
