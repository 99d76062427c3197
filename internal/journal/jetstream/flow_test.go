package jetstream_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/url"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

// forwardTo starts a proxy to a NATS server, which handles each connection of a client with one to the server, and returns its URL.
func forwardTo(t *testing.T, server string, handle func(client, server net.Conn)) string {
	t.Helper()
	to, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				s, err := new(net.Dialer).DialContext(context.Background(), "tcp", to.Host)
				if err != nil {
					return
				}
				defer func() { _ = s.Close() }()
				handle(c, s)
			}()
		}
	}()
	return "nats://" + l.Addr().String()
}

// loseFlowControl is a proxy to a NATS server that loses the first answer to flow control, as a connection that ends does. It returns the
// proxy's URL, and whether an answer was lost.
func loseFlowControl(t *testing.T, server string) (proxy string, lost *atomic.Bool) {
	t.Helper()
	lost = new(atomic.Bool)
	return forwardTo(t, server, func(client, s net.Conn) {
		go func() {
			_, _ = io.Copy(client, s)
			_ = client.Close()
		}()
		for b := make([]byte, 64<<10); ; {
			n, err := client.Read(b)
			if err != nil {
				return
			}
			answer, other := []byte("PUB $JS.FC."), []byte("PUB $XX.FC.") // of the same length
			if bytes.Contains(b[:n], answer) && lost.CompareAndSwap(false, true) {
				copy(b[bytes.Index(b[:n], answer):], other)
			}
			if _, err := s.Write(b[:n]); err != nil {
				return
			}
		}
	}), lost
}

// loseEnd is a proxy to a NATS server that forwards some bytes of the server's to the first client, loses some more, and closes the connection. It returns
// the proxy's URL, and whether it has done so.
func loseEnd(t *testing.T, server string, forwarded, lost int64) (proxy string, done *atomic.Bool) {
	t.Helper()
	var isLater atomic.Bool
	done = new(atomic.Bool)
	return forwardTo(t, server, func(client, s net.Conn) {
		go func() {
			_, _ = io.Copy(s, client)
			_ = s.Close()
		}()
		if isLater.Swap(true) {
			_, _ = io.Copy(client, s)
			return
		}
		_, err := io.CopyN(client, s, forwarded)
		if err == nil {
			_, err = io.CopyN(io.Discard, s, lost)
		}
		done.Store(err == nil)
	}), done
}

// appendMuch appends more than a consumer delivers before it needs an answer to flow control, and returns the number of entries.
func appendMuch(t *testing.T, server string) int {
	t.Helper()
	j, _ := load(t, serverConfig(server))
	defer mustClose(t, j)
	const entries = 200
	source := sourceOf(t, j, "w")
	for range entries { // 12.8 MB
		p, err := j.Append(t.Context(), journal.Record{Source: source, Body: make([]byte, 64<<10)})
		if err == nil {
			_, err = p.Wait(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return entries
}

// wantLoaded loads the entries of a journal, and calls each with the number of entries of workers that were read.
func wantLoaded(t *testing.T, url string, want int, each func(n int)) {
	t.Helper()
	j := open(t, serverConfig(url))
	n := 0
	if err := j.Load(harness.Context(t), 0, func(e jetstream.Entry) error {
		if e.Owner == nil {
			n++
			each(n)
		}
		return nil
	}); err != nil || n != want {
		t.Errorf("got %d entries, %v, want %d", n, err, want)
	}
}

func TestLostAnswerToFlowControlIsRepeated(t *testing.T) {
	t.Parallel()
	server := natstest.Start(t)
	entries := appendMuch(t, server)
	proxy, lost := loseFlowControl(t, server)
	began := time.Now()
	wantLoaded(t, proxy, entries, func(int) {})
	if !lost.Load() {
		t.Error("there was no flow control")
	}
	t.Logf("read in %v", time.Since(began))
}

// TestLoadNoticesThatTheLastEntriesWereLost loses the connection while the server delivers, so that the client lacks the last deliveries, and its consumer has
// none left.
func TestLoadNoticesThatTheLastEntriesWereLost(t *testing.T) {
	t.Parallel()
	server := natstest.Start(t)
	const entries, size = 20, 4 << 10
	j, _ := load(t, serverConfig(server))
	source := sourceOf(t, j, "w")
	for range entries {
		p, err := j.Append(t.Context(), journal.Record{Source: source, Body: make([]byte, size)})
		if err == nil {
			_, err = p.Wait(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	mustClose(t, j)
	proxy, done := loseEnd(t, server, entries*size/2, entries*size/4)
	wantLoaded(t, proxy, entries, func(int) {})
	if !done.Load() {
		t.Error("the server has delivered less than was to be lost")
	}
}

// TestLoadContinuesWhenTheServerHasLostItsConsumer restarts a nats-server while a journal is read. The consumer, which is in the server's
// memory, is gone then.
func TestLoadContinuesWhenTheServerHasLostItsConsumer(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := startServer(t, dir, 0)
	url, port := s.ClientURL(), s.Addr().(*net.TCPAddr).Port
	entries := appendMuch(t, url)
	wantLoaded(t, url, entries, func(n int) {
		if n == 1 {
			stopServer(s)
			s = startServer(t, dir, port)
		}
	})
}

// TestLoadFromADirectorySurvivesTheLossOfItsConnection ends the connection to the embedded server before the journal is read, and while it is.
func TestLoadFromADirectorySurvivesTheLossOfItsConnection(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	j, _ := load(t, config(dir))
	want := appendN(t, j, "w", 3000)
	mustClose(t, j)
	j = open(t, config(dir))
	lose := func() {
		if err := j.Reconnect(); err != nil {
			t.Error(err)
		}
	}
	lose()
	n := 0
	if err := j.Load(harness.Context(t), 0, func(jetstream.Entry) error {
		if n++; n%1000 == 500 {
			lose()
		}
		return nil
	}); err != nil || n != len(want) {
		t.Errorf("got %d entries, %v, want %d", n, err, len(want))
	}
}
