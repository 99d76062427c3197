package jetstream_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/internal/journal/journaltest"
	"github.com/kvcast/kvcast/test/harness"
)

func TestMain(m *testing.M) {
	// nats-server can leave these behind when it stops while it opens or deletes a stream. A server that is not stopped has
	// others, too.
	const natsServer = "github.com/nats-io/nats-server/v2/server"
	goleak.VerifyTestMain(m,
		goleak.IgnoreTopFunction(natsServer+".(*msgBlock).flushLoop"),
		goleak.IgnoreTopFunction(natsServer+".(*fileStore).flushStreamStateLoop"),
		goleak.IgnoreTopFunction(natsServer+"/ats.Register.func1"),
	)
}

// logLines is a writer for slog that tests search.
type logLines struct {
	mu    sync.Mutex
	lines []string
}

func (l *logLines) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, string(line))
	return len(line), nil
}

func (l *logLines) contains(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.ContainsFunc(l.lines, func(line string) bool { return strings.Contains(line, text) })
}

func (l *logLines) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelInfo}))
}

// config returns the configuration of an embedded journal that logs nothing.
func config(dir string) jetstream.Config {
	return jetstream.Config{Dir: dir, Log: slog.New(slog.NewTextHandler(io.Discard, nil))}
}

// open opens a journal and does not load it. The test closes it at its end, unless it has done so.
func open(t testing.TB, cfg jetstream.Config) *jetstream.Journal {
	t.Helper()
	j, err := jetstream.Open(t.Context(), cfg)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_ = j.Close(ctx)
	})
	return j
}

// load opens a journal and returns it with its entries, without the records of owners.
func load(t testing.TB, cfg jetstream.Config) (*jetstream.Journal, []jetstream.Entry) {
	t.Helper()
	j := open(t, cfg)
	var entries []jetstream.Entry
	if err := j.Load(t.Context(), 0, func(e jetstream.Entry) error {
		if e.Owner == nil {
			entries = append(entries, e)
		}
		return nil
	}); err != nil {
		t.Fatalf("load: %v", err)
	}
	return j, entries
}

func mustClose(t testing.TB, j *jetstream.Journal) {
	t.Helper()
	if err := j.Close(context.Background()); err != nil {
		t.Fatalf("close: %v", err)
	}
}

// sources has the *journal.Source of each worker that appendN has appended for, by sourceKey.
var sources sync.Map

type sourceKey struct {
	j      *jetstream.Journal
	worker string
}

// sourceOf returns the source of a worker, which the journal owns if it must.
func sourceOf(t testing.TB, j *jetstream.Journal, worker string) *journal.Source {
	t.Helper()
	source := &journal.Source{Worker: worker, Model: "org/model 1"}
	if !j.IsShared() {
		return source
	}
	if known, ok := sources.Load(sourceKey{j, worker}); ok {
		return known.(*journal.Source)
	}
	if _, err := j.Claim(t.Context(), *source, j.Owner(worker)); err != nil {
		t.Fatal(err)
	}
	sources.Store(sourceKey{j, worker}, source)
	return source
}

// appendN appends n entries of a worker and waits for them. It returns what Load must return for them. In servers, the
// journal becomes the worker's owner with the first call.
func appendN(t testing.TB, j *jetstream.Journal, worker string, n int) []jetstream.Entry {
	t.Helper()
	source := sourceOf(t, j, worker)
	var entries []jetstream.Entry
	var pending []journal.Pending
	for i := range n {
		r := journaltest.Record(i, 300)
		r.Source, r.Tiers = source, kvblock.Tiers(i%8)
		if i%3 > 0 {
			r.State = fmt.Appendf(nil, "state %d \x00\xff", i)
		}
		p, err := j.Append(t.Context(), r)
		if err != nil {
			t.Fatalf("append %d: %v", i, err)
		}
		pending = append(pending, p)
		entries = append(entries, jetstream.Entry{Worker: worker, Tiers: r.Tiers, Body: r.Body, State: r.State})
	}
	for i, p := range pending {
		seq, err := p.Wait(t.Context())
		if err != nil {
			t.Fatalf("wait for append %d: %v", i, err)
		}
		entries[i].Seq = seq
	}
	return entries
}

func wantEntries(t testing.TB, got, want []jetstream.Entry) {
	t.Helper()
	for i := range max(len(got), len(want)) {
		if i >= len(got) || i >= len(want) {
			t.Fatalf("got %d entries, want %d", len(got), len(want))
		}
		g, w := got[i], want[i]
		if g.Seq != w.Seq || g.Worker != w.Worker || g.Tiers != w.Tiers || !bytes.Equal(g.Body, w.Body) || !bytes.Equal(g.State, w.State) {
			t.Fatalf("entry %d: got %.300q, want %.300q", i, fmt.Sprint(g), fmt.Sprint(w))
		}
	}
}

// objects returns the names of all objects with their data as text, and the errors.
func objects(all iter.Seq2[jetstream.Object, error], text func(data []byte) string) (map[string]string, []error) {
	found := make(map[string]string)
	var errs []error
	for o, err := range all {
		if err != nil {
			errs = append(errs, err)
			continue
		}
		found[o.Name] = text(o.Data)
	}
	return found, errs
}

func wantObjects(t testing.TB, got map[string]string, errs []error, want map[string]string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" || errs != nil {
		t.Fatalf("objects (-want +got):\n%s\nerrors: %v", diff, errs)
	}
}

// copyDir copies a directory, also while a journal uses it.
func copyDir(t testing.TB, dir string) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "copy")
	if err := os.CopyFS(to, os.DirFS(dir)); err != nil {
		t.Fatalf("copy %s: %v", dir, err)
	}
	return to
}

// crash returns the directory that a crash of the process leaves. The journal that is open in dir must append nothing more, and
// be closed after that of the directory is opened.
func crash(t testing.TB, dir string) string {
	t.Helper()
	to := copyDir(t, dir)
	if err := os.Rename(filepath.Join(dir, positionName), filepath.Join(to, positionName)); err != nil { // a copy would be known as one
		t.Fatal(err)
	}
	return to
}

// startServer starts a nats-server on loopback with the files of a directory. Port 0 means any.
func startServer(t testing.TB, dir string, port int) *server.Server {
	t.Helper()
	if port == 0 {
		port = harness.FreePort(t) // which no other test gets while this server is down
	}
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: port, JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { stopServer(s) })
	if !s.ReadyForConnections(time.Minute) {
		t.Fatal("nats-server is not ready after a minute")
	}
	return s
}

func stopServer(s *server.Server) {
	s.Shutdown()
	s.WaitForShutdown()
}

// administer calls f with a connection to the nats-server.
func administer(t testing.TB, s *server.Server, f func(js natsjs.JetStream)) {
	t.Helper()
	conn, err := nats.Connect(s.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	js, err := natsjs.New(conn)
	if err != nil {
		t.Fatal(err)
	}
	f(js)
}

// administerDir calls f with a connection to a nats-server that runs meanwhile with the files of an embedded one.
func administerDir(t testing.TB, dir string, f func(js natsjs.JetStream)) {
	t.Helper()
	s := startServer(t, dir, 0)
	administer(t, s, f)
	stopServer(s)
}

// update changes the configuration of a stream.
func update(t testing.TB, js natsjs.JetStream, stream string, change func(c *natsjs.StreamConfig)) {
	t.Helper()
	s, err := js.Stream(t.Context(), stream)
	if err != nil {
		t.Fatal(err)
	}
	c := s.CachedInfo().Config
	change(&c)
	if _, err := js.UpdateStream(t.Context(), c); err != nil {
		t.Fatal(err)
	}
}

// awaitStalled waits until a journal reports that it makes no progress.
func awaitStalled(t testing.TB, j *jetstream.Journal) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); j.Stalled().IsZero(); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatal("the journal is not stalled after a minute")
		}
	}
}
