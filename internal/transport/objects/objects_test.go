package objects_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/objects"
	"github.com/kvcast/kvcast/internal/transport/pool/pooltest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func key(hash uint64) string {
	return fmt.Sprintf("m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@%016x", hash)
}

func newReader(t *testing.T, c objects.Config) *pooltest.Reader {
	t.Helper()
	c.Limit, c.Logger = budget.New("test", 0), slog.New(slog.DiscardHandler)
	return pooltest.Read(t, objects.Subscribe(c))
}

// master is an HTTP server that has a list.
type master struct {
	*httptest.Server
	mu   sync.Mutex
	list func(w http.ResponseWriter, r *http.Request)
}

func newMaster(t *testing.T) *master {
	m := new(master)
	m.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m.mu.Lock()
		list := m.list
		m.mu.Unlock()
		if r.URL.Path != "/get_all_keys" {
			http.NotFound(w, r)
			return
		}
		list(w, r)
	}))
	t.Cleanup(m.Close)
	return m
}

func (m *master) set(list func(w http.ResponseWriter, r *http.Request)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.list = list
}

func (m *master) address() string { return m.Listener.Addr().String() }

// blocks lists objects of the first blocks of the chain.
func blocks(n uint64) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) {
		for hash := range n {
			_, _ = fmt.Fprintln(w, key(hash+1))
		}
	}
}

func TestListsAreFollowed(t *testing.T) {
	t.Parallel()
	m := newMaster(t)
	m.set(blocks(5000)) // several batches
	stored := make(chan struct{})
	r := newReader(t, objects.Config{Server: objects.Mooncake, Address: m.address(), Interval: time.Millisecond, Contents: pooltest.Contents(pooltest.Chain(3000), func(l feed.Learner) {
		<-stored
		l.Stored(pooltest.Chain(4000), false)
	})})
	r.Want(3000)
	if len(r.Events) != 1 || r.Events[0].Kind != transport.Connected {
		t.Errorf("%+v", r.Events)
	}
	close(stored)
	r.Want(4000)
	m.set(blocks(2))
	r.Want(2)
	m.set(blocks(0))
	r.Want(0)
	m.set(func(w http.ResponseWriter, _ *http.Request) { // lines that no block has
		for _, line := range []string{key(1), strings.Repeat("x", 1<<20), strings.Repeat(key(2), 1000), "", "\x00\xff", strings.Repeat("y", 64<<10-1), key(2)} {
			_, _ = io.WriteString(w, line+"\n")
		}
		_, _ = io.WriteString(w, key(3)) // without an end of the line
	})
	r.Want(3)
	// Of answers that fail, two are tolerated, and nothing of them is used.
	m.set(blocks(4))
	r.Want(4)
	r.Gone = 0
	m.set(func(w http.ResponseWriter, _ *http.Request) {
		m.set(func(w http.ResponseWriter, r *http.Request) {
			m.set(blocks(5))
			http.NotFound(w, r)
		})
		w.Header().Set("Content-Length", "1000")
		_, _ = fmt.Fprintln(w, key(1))
	})
	r.Want(5)
	if r.Gone != 0 {
		t.Errorf("%d blocks were removed", r.Gone)
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		list func(w http.ResponseWriter, r *http.Request)
		want string
	}{
		"no list":         {http.NotFound, "has answered 404 Not Found; want 200 OK from a Mooncake master that serves"},
		"another address": {func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/elsewhere", http.StatusFound) }, "has answered 302 Found"},
		"a list that breaks off": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000")
			_, _ = fmt.Fprintln(w, key(1))
		}, "unexpected EOF"},
		"a list that is too long": {func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Content-Length", "1073741825") }, "the list of objects is too long; want at most 1073741824 bytes"},
		"chunks that break off": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = fmt.Fprintln(w, key(1))
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}, "unexpected EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMaster(t)
			m.set(c.list)
			r := newReader(t, objects.Config{Server: objects.Mooncake, Address: m.address(), Contents: func(ctx context.Context, pool string, l feed.Learner) error {
				if !strings.Contains(name, "breaks") && !strings.Contains(name, "break off") {
					t.Error("the contents of blocks are read although there is no list")
				}
				return pooltest.Contents(pooltest.Chain(1), nil)(ctx, pool, l)
			}})
			if e := r.Last(); e.Kind != transport.Failed || e.Err == nil || !strings.Contains(e.Err.Error(), c.want) || len(r.Held) > 0 {
				t.Errorf("%+v; want %s", e, c.want)
			}
		})
	}
}

// raw answers each request of a connection with a text, and closes the connection.
func raw(t *testing.T, answer string) (address string) {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var served sync.WaitGroup
	served.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Read(make([]byte, 4<<10))
			_, _ = io.WriteString(c, answer)
			_ = c.Close()
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		served.Wait()
	})
	return l.Addr().String()
}

func TestServersThatAreNone(t *testing.T) {
	t.Parallel()
	for answer, want := range map[string]string{
		"HTTP/1.0 200 OK\r\n\r\n" + key(1) + "\n":  "has no length, so that its end could be missing; want Content-Length or chunks",
		"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f": "malformed HTTP",
		"": "EOF",
		"HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 128<<10) + "\r\n\r\n": "exceeded",
	} {
		r := newReader(t, objects.Config{Server: objects.Mooncake, Address: raw(t, answer), Contents: pooltest.Contents(pooltest.Chain(1), nil)})
		if e := r.Last(); e.Kind != transport.Failed || e.Err == nil || !strings.Contains(e.Err.Error(), want) || len(r.Held) > 0 {
			t.Errorf("%+v; want %s", e, want)
		}
	}
}

// TestConnectionsEnd has servers that fail after a list, contents that end, and a reader that interrupts.
func TestConnectionsEnd(t *testing.T) {
	t.Parallel()
	m := newMaster(t)
	m.set(blocks(1))
	r := newReader(t, objects.Config{Server: objects.Mooncake, Address: m.address(), Interval: time.Millisecond, Contents: pooltest.Contents(pooltest.Chain(1), nil)})
	r.Want(1)
	m.set(http.NotFound)
	if e := r.Last(); e.Kind != transport.Disconnected || !strings.Contains(e.Err.Error(), "404") {
		t.Errorf("%+v", e)
	}
	first := r.Topic
	m.set(blocks(1))
	r = newReader(t, objects.Config{Server: objects.Mooncake, Address: m.address(), Interval: time.Millisecond, Contents: pooltest.Contents(pooltest.Chain(1), nil)})
	if r.Want(1); r.Topic == first {
		t.Errorf("two connections have the topic %q", first)
	}
	r.Interrupt()
	for err := error(nil); !errors.Is(err, transport.ErrInterrupted); err = r.Read() {
		if errors.Is(err, transport.ErrEnded) {
			t.Fatal(err)
		}
	}
	ended := errors.New("the journal has ended")
	for _, begins := range []bool{false, true} {
		r = newReader(t, objects.Config{Server: objects.Mooncake, Address: m.address(), Interval: time.Hour, Contents: func(_ context.Context, _ string, l feed.Learner) error {
			if begins {
				l.Begun()
			}
			return ended
		}})
		if e := r.Last(); !errors.Is(e.Err, ended) {
			t.Errorf("%+v", e)
		}
	}
	r = newReader(t, objects.Config{Server: objects.Mooncake, Address: m.address(), Interval: time.Millisecond, Contents: feed.NoContents})
	if err := errors.Join(r.Read(), r.Read()); err != nil || r.Topic == "" || len(r.Held) > 0 {
		t.Errorf("%v, topic %q, %v", err, r.Topic, r.Held)
	}
}

func TestReadGreeting(t *testing.T) {
	t.Parallel()
	m := newMaster(t)
	m.set(blocks(0))
	addresses := []string{m.address(), raw(t, "no HTTP"), raw(t, "")}
	var got []bool
	for _, address := range addresses {
		c, err := new(net.Dialer).DialContext(t.Context(), "tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, objects.ReadGreeting(t.Context(), c) == nil)
		_ = c.Close()
	}
	if want := []bool{true, false, false}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
