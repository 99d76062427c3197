package jetstream_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/test/harness"
)

// serverConfig returns the configuration of a journal in a nats-server.
func serverConfig(url string) jetstream.Config {
	cfg := config("")
	cfg.Servers = []string{url}
	return cfg
}

// startLoad appends from four workers until stop is called, which returns the number of acknowledged entries.
func startLoad(t *testing.T, j *jetstream.Journal) (acknowledged *atomic.Uint64, stop func()) {
	stopped := make(chan struct{})
	acknowledged = new(atomic.Uint64)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			source := sourceOf(t, j, fmt.Sprintf("w%d", i))
			var last journal.Pending
			for n := 0; ; n++ {
				select {
				case <-stopped:
					if _, err := last.Wait(t.Context()); err != nil {
						t.Errorf("wait: %v", err)
					}
					return
				default:
				}
				r := journal.Record{Source: source, Body: fmt.Appendf(nil, "%d", n)}
				p, err := j.Append(t.Context(), r)
				if err != nil {
					t.Errorf("append: %v", err)
					return
				}
				last = p
				acknowledged.Add(1)
			}
		})
	}
	return acknowledged, func() { close(stopped); wg.Wait() }
}

// wantOnce checks that each of startLoad's entries is there once and in order.
func wantOnce(t *testing.T, entries []jetstream.Entry, want uint64) {
	t.Helper()
	next := make(map[string]int)
	for _, e := range entries {
		if string(e.Body) != fmt.Sprint(next[e.Worker]) {
			t.Fatalf("entry %d has body %s of %s, want body %d", e.Seq, e.Body, e.Worker, next[e.Worker])
		}
		next[e.Worker]++
	}
	if uint64(len(entries)) != want {
		t.Errorf("got %d entries, want %d", len(entries), want)
	}
}

// awaitNewest waits until a journal has an entry.
func awaitNewest(j *jetstream.Journal, seq uint64) {
	for {
		changed := j.Changed()
		if j.Bounds().Newest >= seq {
			return
		}
		<-changed
	}
}

func TestAppendsContinueWhenTheServerIsBack(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := startServer(t, dir, 0)
	port := s.Addr().(*net.TCPAddr).Port
	j, _ := load(t, serverConfig(s.ClientURL()))
	acknowledged, stop := startLoad(t, j)
	for i := range testclass.Size(1, 3) {
		awaitNewest(j, j.Bounds().Newest+500*uint64(i+1))
		stopServer(s)
		s = startServer(t, dir, port)
	}
	stop()
	if b := j.Bounds(); b.Newest != acknowledged.Load()+4 { // with four records of owners
		t.Errorf("newest: got %d, want %d", b.Newest, acknowledged.Load()+4)
	}
	if since := j.Stalled(); !since.IsZero() {
		t.Errorf("an idle journal is stalled since %v", since)
	}
	mustClose(t, j)
	_, got := load(t, serverConfig(s.ClientURL()))
	wantOnce(t, got, acknowledged.Load())
}

func TestSingleServerStoresNoReplicas(t *testing.T) {
	t.Parallel()
	cfg := serverConfig(startServer(t, t.TempDir(), 0).ClientURL())
	cfg.Replicas = 3
	if _, err := jetstream.Open(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "replicas are 3") {
		t.Errorf("open with 3 replicas: got %v", err)
	}
}

func TestServersWithoutALeaderAreAskedAgain(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		code        natsjs.ErrorCode
		description string
		want        bool
	}{
		{10008, "", true}, // JetStream system temporarily unavailable
		{10005, "no suitable peers for placement, peer offline", true},
		{10005, "no suitable peers for placement, insufficient storage", false},
		{natsjs.JSErrCodeStreamNotFound, "", false},
	} {
		err := fmt.Errorf("read: %w", &natsjs.APIError{Code: 503, ErrorCode: tt.code, Description: tt.description})
		if got := jetstream.IsUnanswered(err); got != tt.want {
			t.Errorf("%v: got %t, want %t", err, got, tt.want)
		}
	}
}

// TestCheckpointIsReadWhenTheServerIsBack reads a checkpoint while the server is away.
func TestCheckpointIsReadWhenTheServerIsBack(t *testing.T) {
	t.Parallel()
	dir, lines := t.TempDir(), &logLines{}
	s := startServer(t, dir, 0)
	port := s.Addr().(*net.TCPAddr).Port
	cfg := serverConfig(s.ClientURL())
	cfg.Log = slog.New(slog.NewTextHandler(lines, &slog.HandlerOptions{Level: slog.LevelDebug}))
	j, _ := load(t, cfg)
	put(t, j, "w", []byte("data"))
	stopServer(s)
	read := make(chan error, 1)
	go func() {
		data, err := j.Checkpoints().Get(t.Context(), "w")
		if err == nil && string(data) != "data" {
			err = fmt.Errorf("got %q", data)
		}
		read <- err
	}()
	harness.WaitFor(t, func() bool { return len(read) > 0 || lines.contains("A checkpoint cannot be read now.") })
	startServer(t, dir, port)
	if err := <-read; err != nil {
		t.Error(err)
	}
	mustClose(t, j)
}

// proxy passes connections on to a nats-server.
type proxy struct {
	listener net.Listener
	wg       sync.WaitGroup
	mu       sync.Mutex // guards all below
	conns    []net.Conn
	silent   chan struct{} // while not nil, nothing comes from the server until it is closed
}

func startProxy(t *testing.T, s *server.Server) *proxy {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: l}
	p.wg.Go(func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			to, err := new(net.Dialer).DialContext(t.Context(), "tcp", s.Addr().String())
			if err != nil {
				_ = from.Close()
				continue
			}
			p.mu.Lock()
			p.conns = append(p.conns, from, to)
			p.mu.Unlock()
			p.wg.Go(func() { _, _ = io.Copy(to, from); _ = to.Close() })
			p.wg.Go(func() { p.answer(from, to) })
		}
	})
	t.Cleanup(func() { _ = l.Close(); p.cut(); p.wg.Wait() })
	return p
}

// answer copies what the server sends.
func (p *proxy) answer(from, to net.Conn) {
	defer func() { _ = from.Close() }()
	buf := make([]byte, 32<<10)
	for {
		n, err := to.Read(buf)
		p.mu.Lock()
		silent := p.silent
		p.mu.Unlock()
		if silent != nil {
			<-silent
			return
		}
		if err != nil {
			return
		}
		if _, err := from.Write(buf[:n]); err != nil {
			return
		}
	}
}

// silence discards what the server sends from now on.
func (p *proxy) silence() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.silent = make(chan struct{})
}

// cut closes all connections and ends the silence.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.silent != nil {
		close(p.silent)
		p.silent = nil
	}
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
}

func (p *proxy) url() string { return "nats://" + p.listener.Addr().String() }

// TestUnknownFateIsNotDoubled cuts the connection when the server has stored entries whose acknowledgements were lost.
func TestUnknownFateIsNotDoubled(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	p := startProxy(t, s)
	cfg := serverConfig(p.url())
	cfg.InFlight = 64
	j, _ := load(t, cfg)
	acknowledged, stop := startLoad(t, j)
	awaitNewest(j, 100)
	p.silence()
	administer(t, s, func(js natsjs.JetStream) {
		// Until appends wait for acknowledgements, and the server has what is in flight. The journal may have read all of it.
		for stored, appended := uint64(0), uint64(0); ; {
			stream, err := js.Stream(t.Context(), jetstream.DefaultStream)
			if err != nil {
				t.Fatal(err)
			}
			last, n := stream.CachedInfo().State.LastSeq, acknowledged.Load()
			if last == stored && n == appended {
				break
			}
			stored, appended = last, n
		}
	})
	p.cut()
	awaitNewest(j, j.Bounds().Newest+500)
	stop()
	mustClose(t, j)
	_, got := load(t, serverConfig(s.ClientURL()))
	wantOnce(t, got, acknowledged.Load())
}

// purged returns a function that removes entries from the stream.
func purged(options ...natsjs.StreamPurgeOpt) func(t *testing.T, js natsjs.JetStream) {
	return func(t *testing.T, js natsjs.JetStream) {
		t.Helper()
		s, err := js.Stream(t.Context(), jetstream.DefaultStream)
		if err == nil {
			err = s.Purge(t.Context(), options...)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestLostStreamFailsTheJournal(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		damage func(t *testing.T, js natsjs.JetStream)
		want   error
		text   string
	}{
		{"gone", func(t *testing.T, js natsjs.JetStream) {
			if err := js.DeleteStream(t.Context(), jetstream.DefaultStream); err != nil {
				t.Fatal(err)
			}
		}, jetstream.ErrUnreadable, "is gone"},
		{"purged", purged(), jetstream.ErrUnreadable, "somebody has purged it; it continues in a new epoch"},
		{"purged but for the newest entry", purged(natsjs.WithPurgeKeep(1)), jetstream.ErrUnreadable, "somebody has purged it; it continues in a new epoch"},
		{"a worker's entries purged", purged(natsjs.WithPurgeSubject("kvcast.kvcast.v")), jetstream.ErrUnreadable, "somebody has purged it; it continues in a new epoch"},
		{"created again", func(t *testing.T, js natsjs.JetStream) {
			s, err := js.Stream(t.Context(), jetstream.DefaultStream)
			if err != nil {
				t.Fatal(err)
			}
			c := s.CachedInfo().Config
			c.Metadata["kvcast.epoch"] = "another"
			if err := js.DeleteStream(t.Context(), jetstream.DefaultStream); err != nil {
				t.Fatal(err)
			}
			if _, err := js.CreateStream(t.Context(), c); err != nil {
				t.Fatal(err)
			}
		}, journal.ErrFenced, `has the new epoch "another"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := startServer(t, t.TempDir(), 0)
			j, _ := load(t, serverConfig(s.ClientURL()))
			appendN(t, j, "w", 10)
			appendN(t, j, "v", 10)
			appendN(t, j, "w", 10)
			administer(t, s, func(js natsjs.JetStream) { tt.damage(t, js) })
			began := time.Now()
			wantFailure(t, j, tt.want, tt.text)
			took := time.Since(began)
			administer(t, s, func(js natsjs.JetStream) {
				account, err := js.AccountInfo(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if n := account.API.Total; float64(n) > 100+100*took.Seconds() {
					t.Errorf("the journal has sent %d requests in %v", n, took)
				}
			})
		})
	}
}

// TestServerThatLostEntriesIsUnreadable restores the server's files from before some entries: as after a crash of the
// server's machine.
func TestServerThatLostEntriesIsUnreadable(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := startServer(t, dir, 0)
	port := s.Addr().(*net.TCPAddr).Port
	j, _ := load(t, serverConfig(s.ClientURL()))
	appendN(t, j, "w", 10)
	old := copyDir(t, dir)
	appendN(t, j, "w", 10)
	stopServer(s)
	awaitStalled(t, j)
	s = startServer(t, old, port)
	wantFailure(t, j, jetstream.ErrUnreadable, "has lost the entries 12 to 21")
	was := j.Bounds()
	mustClose(t, j)
	j, entries := load(t, serverConfig(s.ClientURL()))
	if b := j.Bounds(); b.Newest != 21 || len(entries) > 0 || b.Epoch == was.Epoch {
		t.Errorf("opened again: got %+v after %+v and %d entries, want a new epoch without entries after entry 21", b, was, len(entries))
	}
	mustClose(t, j)
}

// TestServerWhoseEntriesWereReplacedIsUnreadable restores the server's files as after a crash of its machine, and another instance
// appends as many entries as were lost before the first one has a connection again: no seq is missing.
func TestServerWhoseEntriesWereReplacedIsUnreadable(t *testing.T) {
	t.Parallel()
	for name, lost := range map[string]int{"some were lost": 10, "one was lost": 1} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := startServer(t, dir, 0)
			port := s.Addr().(*net.TCPAddr).Port
			j, _ := load(t, serverConfig(s.ClientURL()))
			appendN(t, j, "w", 10)
			old := copyDir(t, dir)
			appendN(t, j, "w", lost)
			was := j.Bounds()
			stopServer(s)
			awaitStalled(t, j)
			s = startServer(t, old, 0)
			other, _ := load(t, serverConfig(s.ClientURL()))
			appendN(t, other, "v", lost+5)
			mustClose(t, other)
			stopServer(s)
			s = startServer(t, old, port)
			wantFailure(t, j, jetstream.ErrUnreadable, "entry "+strconv.FormatUint(was.Newest, 10)+" of ", "is another one than was read: the stream has lost entries")
			mustClose(t, j)
			j, entries := load(t, serverConfig(s.ClientURL()))
			if b := j.Bounds(); b.Epoch == was.Epoch || len(entries) > 0 {
				t.Errorf("opened again: got %+v after %+v and %d entries, want a new epoch without entries", b, was, len(entries))
			}
			mustClose(t, j)
		})
	}
}

// writerFunc is an io.Writer.
type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// TestLossIsKnownUntilTheEpochHasChanged has another instance that began to end the epoch of a stream that has lost entries,
// and does not complete it for a while.
func TestLossIsKnownUntilTheEpochHasChanged(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := startServer(t, dir, 0)
	port := s.Addr().(*net.TCPAddr).Port
	needed := make(chan struct{}, 100)
	cfg := serverConfig(s.ClientURL())
	cfg.Log = slog.New(slog.NewTextHandler(writerFunc(func(line []byte) (int, error) {
		if bytes.Contains(line, []byte("The stream has lost entries, and needs a new epoch.")) {
			needed <- struct{}{}
		}
		return len(line), nil
	}), nil))
	j, _ := load(t, cfg)
	appendN(t, j, "w", 10)
	if _, err := j.Instances(t.Context()); err != nil { // creates the bucket
		t.Fatal(err)
	}
	administer(t, s, func(js natsjs.JetStream) {
		kv, err := js.KeyValue(t.Context(), jetstream.DefaultStream+"-instances")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := kv.Put(t.Context(), "ended."+j.Bounds().Epoch, []byte("another")); err != nil {
			t.Fatal(err)
		}
	})
	old := copyDir(t, dir)
	appendN(t, j, "w", 10)
	stopServer(s)
	awaitStalled(t, j)
	s = startServer(t, old, port)
	for range 2 {
		select {
		case <-needed:
		case <-harness.Context(t).Done():
			t.Fatal("the loss is not noticed")
		}
	}
	if err := j.Err(); err != nil {
		t.Errorf("failed with %v; want it to stay while the epoch is the old one", err)
	}
	administer(t, s, func(js natsjs.JetStream) {
		stream, err := js.Stream(t.Context(), jetstream.DefaultStream)
		if err != nil {
			t.Fatal(err)
		}
		c := stream.CachedInfo().Config
		c.Metadata["kvcast.epoch"] = "another"
		if _, err := js.UpdateStream(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	})
	wantFailure(t, j, journal.ErrFenced, `has the new epoch "another"`)
	mustClose(t, j)
}

// TestEpochIsEndedOnce discards the journal of two instances at once: one does, and the other is told so.
func TestEpochIsEndedOnce(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	former, _ := load(t, serverConfig(s.ClientURL()))
	appendN(t, former, "w", 10)
	mustClose(t, former)
	a, b := open(t, serverConfig(s.ClientURL())), open(t, serverConfig(s.ClientURL()))
	errs := make(chan error, 2)
	for _, j := range []*jetstream.Journal{a, b} {
		go func() { errs <- j.Discard(t.Context()) }()
	}
	first, second := <-errs, <-errs
	if first != nil {
		first, second = second, first
	}
	if first != nil || !errors.Is(second, journal.ErrFenced) {
		t.Errorf("got %v and %v, want one success and one %v", first, second, journal.ErrFenced)
	}
	mustClose(t, a)
	mustClose(t, b)
}
