package jetstream_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/internal/journal/journaltest"
)

// instance opens a journal in servers with the name of an instance.
func instance(t *testing.T, url, name string) *jetstream.Journal {
	t.Helper()
	cfg := serverConfig(url)
	cfg.Instance = name
	j, _ := load(t, cfg)
	return j
}

// mustClaim makes a journal the owner of a worker, whoever owns it, and returns a source for its appends.
func mustClaim(t *testing.T, j *jetstream.Journal, worker string) *journal.Source {
	t.Helper()
	source := &journal.Source{Worker: worker, Model: "m"}
	for {
		_, err := j.Claim(t.Context(), *source, j.Owner(worker))
		if err == nil {
			break
		}
		if !errors.Is(err, journal.ErrFenced) { // else the journal has not read the last record yet
			t.Fatal(err)
		}
	}
	sources.Store(sourceKey{j, worker}, source)
	return source
}

// appendOne appends an entry and returns the result.
func appendOne(t *testing.T, j *jetstream.Journal, source *journal.Source, body string) (uint64, error) {
	t.Helper()
	p, err := j.Append(t.Context(), journal.Record{Source: source, Body: []byte(body)})
	if err != nil {
		return 0, err
	}
	return p.Wait(t.Context())
}

func wantFenced(t *testing.T, err error, text string) {
	t.Helper()
	if !errors.Is(err, journal.ErrFenced) || !strings.Contains(err.Error(), text) {
		t.Errorf("got %v, want ErrFenced with %q", err, text)
	}
}

func TestLaterClaimFencesTheFormerOwner(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	a, b := instance(t, s.ClientURL(), "a"), instance(t, s.ClientURL(), "b")
	_, err := appendOne(t, a, &journal.Source{Worker: "w"}, "x")
	wantFenced(t, err, `this instance does not own worker "w"`)
	appendN(t, a, "w", 10)
	appendN(t, a, "v", 10)
	awaitNewest(b, 22)
	if o := b.Owner("w"); o != (jetstream.Owner{Instance: "a", Writer: "a", Seq: 1}) {
		t.Errorf("owner: got %+v, want a since entry 1", o)
	}
	appendN(t, b, "w", 3)
	awaitNewest(a, 26)
	_, err = appendOne(t, a, sourceOf(t, a, "w"), "x")
	wantFenced(t, err, `does not own worker "w"`)
	appendN(t, a, "v", 1)
	wantSame(t, b, a)
	if a.Err() != nil || b.Err() != nil {
		t.Errorf("the journals have failed: %v, %v", a.Err(), b.Err())
	}
	_, err = a.Claim(t.Context(), journal.Source{Worker: "w"}, jetstream.Owner{Instance: "a", Writer: "a", Seq: 1})
	wantFenced(t, err, `since entry 23, its owner is instance "b"`)
	mustClaim(t, a, "w")
	appendN(t, a, "w", 5)
	wantSame(t, b, a)
}

func TestReleaseNamesTheNextOwner(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	a, b := instance(t, s.ClientURL(), "a"), instance(t, s.ClientURL(), "b")
	appendN(t, a, "w", 3)
	if _, err := a.Release(t.Context(), "w", "b"); err != nil {
		t.Fatal(err)
	}
	_, err := appendOne(t, a, sourceOf(t, a, "w"), "x")
	wantFenced(t, err, "does not own")
	awaitNewest(b, 5)
	if o := b.Owner("w"); o.Instance != "b" || o.Writer != "a" || !o.IsReleased() {
		t.Errorf("owner: got %+v, want b by a", o)
	}
	appendN(t, b, "w", 3)
	if _, err := b.Release(t.Context(), "w", ""); err != nil {
		t.Fatal(err)
	}
	if o := b.Owner("w"); o.Instance != "" || o.Writer != "b" {
		t.Errorf("owner: got %+v, want nobody by b", o)
	}
	if seq, err := b.Release(t.Context(), "w", ""); err != nil || seq != 0 {
		t.Errorf("release of a worker that is not owned: %d, %v", seq, err)
	}
	mustClaim(t, a, "w")
	appendN(t, a, "w", 3)
}

// TestForgottenWorkerFailsItsAppends forgets a worker while its appends wait for the server.
func TestForgottenWorkerFailsItsAppends(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	p := startProxy(t, s)
	j, _ := load(t, serverConfig(p.url()))
	source := mustClaim(t, j, "w")
	p.silence()
	pending, err := j.Append(t.Context(), journal.Record{Source: source, Body: []byte("x")})
	if err != nil {
		t.Fatal(err)
	}
	j.Forget("w")
	_, err = pending.Wait(t.Context())
	wantFenced(t, err, "was dropped")
	p.cut()
	source = mustClaim(t, j, "w")
	if _, err := appendOne(t, j, source, "y"); err != nil {
		t.Fatal(err)
	}
}

// TestAppendsOfAnIsolatedOwnerAreFenced cuts an owner off while it appends, and lets another one claim the worker.
func TestAppendsOfAnIsolatedOwnerAreFenced(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	p := startProxy(t, s)
	a, b := instance(t, p.url(), "a"), instance(t, s.ClientURL(), "b")
	source := mustClaim(t, a, "w")
	p.silence()
	var pending []journal.Pending
	for n := range 20 {
		q, err := a.Append(t.Context(), journal.Record{Source: source, Body: fmt.Appendf(nil, "a%d", n)})
		if err != nil {
			t.Fatal(err)
		}
		pending = append(pending, q)
	}
	mustClaim(t, b, "w")
	appendN(t, b, "w", 3)
	p.cut()
	stored := 0
	for n, q := range pending {
		seq, err := q.Wait(t.Context())
		switch {
		case err == nil && n == stored && seq == uint64(n)+2:
			stored++ // it reached the server before the claim of b
		case !errors.Is(err, journal.ErrFenced):
			t.Fatalf("append %d: got %d, %v, want ErrFenced", n, seq, err)
		}
	}
	wantSame(t, a, b)
	if want := uint64(1 + stored + 1 + 3); a.Bounds().Newest != want {
		t.Errorf("newest: got %d, want %d", a.Bounds().Newest, want)
	}
}

// TestOwnersTakeWorkersFromEachOther lets three instances claim four workers at random while all append for all. Every
// entry that was acknowledged is in the stream once, in order, and by the owner at that point.
func TestOwnersTakeWorkersFromEachOther(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	const claims, appends = 30, 40
	var wg sync.WaitGroup
	var mu sync.Mutex
	acknowledged := make(map[uint64]string)
	for i := range 3 {
		name := fmt.Sprintf("i%d", i)
		j := instance(t, s.ClientURL(), name)
		for w := range 4 {
			random := rand.New(rand.NewPCG(uint64(i), uint64(w)))
			wg.Go(func() {
				for c := range claims {
					source := &journal.Source{Worker: fmt.Sprintf("w%d", w)}
					if _, err := j.Claim(t.Context(), *source, j.Owner(source.Worker)); err != nil {
						if !errors.Is(err, journal.ErrFenced) {
							t.Error(err)
						}
						continue
					}
					var last journal.Pending
					for n := range random.IntN(appends) {
						body := fmt.Sprintf("%s %d %d", name, c, n)
						p, err := j.Append(t.Context(), journal.Record{Source: source, Body: []byte(body)})
						if last = p; err == nil {
							wg.Go(func() {
								seq, err := p.Wait(t.Context())
								switch {
								case err == nil:
									mu.Lock()
									defer mu.Unlock()
									acknowledged[seq] = body
								case !errors.Is(err, journal.ErrFenced):
									t.Error(err)
								}
							})
						} else if !errors.Is(err, journal.ErrFenced) {
							t.Error(err)
						}
					}
					if random.IntN(2) == 0 {
						_, _ = last.Wait(t.Context())
					}
					j.Forget(source.Worker)
				}
			})
		}
	}
	wg.Wait()
	owners, next := make(map[string]string), make(map[string]int)
	stored := 0
	reader := open(t, serverConfig(s.ClientURL()))
	if err := reader.Load(t.Context(), 0, func(e jetstream.Entry) error {
		if e.Owner != nil {
			owners[e.Worker], next[e.Worker] = e.Owner.Instance, 0
			return nil
		}
		var by string
		var claim, n int
		if _, err := fmt.Sscanf(string(e.Body), "%s %d %d", &by, &claim, &n); err != nil {
			t.Fatal(err)
		}
		if by != owners[e.Worker] || n != next[e.Worker] {
			t.Fatalf("entry %d of %s is append %d of %s, want append %d of %s", e.Seq, e.Worker, n, by, next[e.Worker], owners[e.Worker])
		}
		next[e.Worker]++
		if body, ok := acknowledged[e.Seq]; ok {
			if body != string(e.Body) {
				t.Fatalf("entry %d is %q, and %q was acknowledged", e.Seq, e.Body, body)
			}
			stored++
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if stored != len(acknowledged) || stored == 0 {
		t.Errorf("%d of %d acknowledged entries are stored", stored, len(acknowledged))
	}
}

func TestWorkerIsLoadedAlone(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	j, _ := load(t, serverConfig(s.ClientURL()))
	var want []jetstream.Entry
	for range 3 {
		want = append(want, appendN(t, j, "w", 50)...)
		appendN(t, j, "other", 10)
	}
	for _, after := range []uint64{1, 60, want[149].Seq - 1} {
		var got []jetstream.Entry
		if err := j.LoadWorker(t.Context(), "w", after, want[149].Seq, func(e jetstream.Entry) error {
			got = append(got, e)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		wanted := want
		for len(wanted) > 0 && wanted[0].Seq <= after {
			wanted = wanted[1:]
		}
		wantEntries(t, got, wanted)
	}
}

// TestAppendsAreVisibleInOrderAndFlushed appends for several workers, and closes the journal.
func TestAppendsAreVisibleInOrderAndFlushed(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	cfg := serverConfig(s.ClientURL())
	cfg.InFlight = 32
	j, _ := load(t, cfg)
	var pending []journal.Pending
	for n := range 300 {
		source := sourceOf(t, j, fmt.Sprintf("w%d", n%4))
		changed := j.Changed()
		p, err := j.Append(t.Context(), journal.Record{Source: source, Body: fmt.Append(nil, n/4)})
		if err != nil {
			t.Fatal(err)
		}
		pending = append(pending, p)
		if n%50 == 0 {
			seq, err := p.Wait(t.Context())
			if err != nil || j.Bounds().Newest < seq {
				t.Fatalf("acknowledged: %d, %v, newest %d", seq, err, j.Bounds().Newest)
			}
			<-changed
		}
	}
	mustClose(t, j)
	last := make(map[int]uint64)
	for n, p := range pending {
		seq, err := p.Wait(t.Context())
		if err != nil || seq <= last[n%4] {
			t.Fatalf("append %d: got seq %d after %d, %v", n, seq, last[n%4], err)
		}
		last[n%4] = seq
	}
	_, err := j.Append(t.Context(), journaltest.Record(1, 10))
	if !errors.Is(err, journal.ErrClosed) {
		t.Errorf("append after close: %v", err)
	}
	_, got := load(t, serverConfig(s.ClientURL()))
	wantOnce(t, got, 300)
}

// TestRecordsAreRenewedSoThatEntriesCanBeRemoved has an idle worker among busy ones, and one that nobody owns.
func TestRecordsAreRenewedSoThatEntriesCanBeRemoved(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	cfg := serverConfig(s.ClientURL())
	cfg.Retention.MaxBytes = 100_000
	j, _ := load(t, cfg)
	appendN(t, j, "idle", 1)
	appendN(t, j, "gone", 1)
	if _, err := j.Release(t.Context(), "gone", ""); err != nil {
		t.Fatal(err)
	}
	for j.Owner("idle").Seq < 1000 {
		j.Pin(j.Bounds().Newest)
		appendN(t, j, "busy", 100)
		j.Retain(j.Bounds().Newest)
	}
	administer(t, s, func(js natsjs.JetStream) {
		stream, err := js.Stream(t.Context(), jetstream.DefaultStream)
		if err != nil {
			t.Fatal(err)
		}
		for stream.CachedInfo().State.FirstSeq == 1 {
			if _, err := stream.Info(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	})
	idle := j.Owner("idle")
	mustClose(t, j)
	j, _ = load(t, cfg)
	if o := j.Owner("idle"); o != idle {
		t.Errorf("owner of the idle worker: got %+v, want %+v", o, idle)
	}
	if o := j.Owner("gone"); o.Instance != "" {
		t.Errorf("owner of a worker that was released: got %+v, want nobody", o)
	}
	appendN(t, j, "idle", 1)
	appendN(t, j, "gone", 1)
}

func TestFormerOwnerCannotPutAfterTheClaim(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	a, b := instance(t, s.ClientURL(), "a"), instance(t, s.ClientURL(), "b")
	put := func(j *jetstream.Journal, data string, claim uint64) error {
		return j.Checkpoints().PutClaimed(context.Background(), "worker.w", []byte(data), claim)
	}
	if err := errors.Join(put(a, "1", 5), put(a, "2", 5), put(b, "3", 9)); err != nil {
		t.Fatal(err)
	}
	wantFenced(t, put(a, "4", 5), "the one that is stored has the claim 9, after 5")
	if data, err := a.Checkpoints().Get(t.Context(), "worker.w"); err != nil || string(data) != "3" {
		t.Errorf("got %q, %v, want what the owner has put", data, err)
	}
	if data, err := a.Checkpoints().Get(t.Context(), "worker.v"); err != nil || data != nil {
		t.Errorf("got %q, %v, want nothing", data, err)
	}
}
