package mooncake_test

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
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/mooncake"
	"github.com/kvcast/kvcast/internal/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func key(hash uint64) string {
	return fmt.Sprintf("m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@%016x", hash)
}

// chain is the content of blocks 1 to n, each the parent of the next.
func chain(n uint64) (all []feed.Content) {
	for hash := uint64(1); hash <= n; hash++ {
		all = append(all, feed.Content{Hash: hash, Parent: hash - 1, HasParent: hash > 1, TokensHash: 100 + hash, Tokens: 16, LoRA: "adapter"})
	}
	return all
}

// contents passes on contents, and calls then, if it is not nil, with store.
func contents(all []feed.Content, then func(store func([]feed.Content))) feed.Contents {
	return func(ctx context.Context, _ string, store func([]feed.Content), begun func()) error {
		store(all)
		begun()
		if then != nil {
			then(store)
		}
		<-ctx.Done()
		return nil
	}
}

// reader reads a Receiver as package ingest does.
type reader struct {
	t *testing.T
	transport.Receiver
	rules  *wire.Rules
	topic  string
	seq    uint64
	held   map[uint64]uint64 // tokens hashes by hash
	gone   int               // number of blocks that were removed
	events []transport.Event
}

func newReader(t *testing.T, c mooncake.Config) *reader {
	t.Helper()
	c.Limit, c.Logger = budget.New("test", 0), slog.New(slog.DiscardHandler)
	r := &reader{t: t, Receiver: mooncake.Subscribe(c), rules: wire.NewRules(new(wire.BlockSize)), held: make(map[uint64]uint64)}
	r.rules.ContentInKeys = true
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// next reads a chunk, and returns an error when nothing follows.
func (r *reader) next() error {
	chunk, err := r.Next(func() time.Time { return time.Time{} })
	if err != nil {
		return err
	}
	defer r.Recycle(chunk)
	r.events = append(r.events, chunk.Events...)
	for _, m := range chunk.Messages {
		var decoder wire.Decoder
		batch, err := decoder.Decode(m.Frames[2])
		if err != nil {
			r.t.Fatal(err)
		}
		var counts wire.Counts
		r.rules.Admit(batch, 0, &counts)
		if counts != (wire.Counts{}) || batch.Doubts != (wire.Doubts{}) {
			r.t.Fatalf("events were left out: %v", counts)
		}
		if r.seq++; r.topic != "" && r.topic != string(m.Frames[0]) || r.seq != uint64(m.Frames[1][7])+uint64(m.Frames[1][6])<<8 {
			r.t.Fatalf("topic %q and seq %v after %q and %d", m.Frames[0], m.Frames[1], r.topic, r.seq)
		}
		r.topic = string(m.Frames[0])
		for _, e := range batch.Events {
			for i, hash := range e.BlockHashes {
				_, isHeld := r.held[hash]
				switch {
				case isHeld != (e.Kind == wire.KindRemoved), e.Tier != kvblock.TierExternal:
					r.t.Fatalf("kind %d of block %d in tier %d", e.Kind, hash, e.Tier)
				case e.Kind == wire.KindRemoved:
					delete(r.held, hash)
					r.gone++
				case e.LoRAName != "adapter" || e.BlockSize != 16:
					r.t.Fatalf("%+v", e)
				default:
					r.held[hash] = e.TokensHashes[i]
				}
			}
		}
	}
	return nil
}

// want reads until so many first blocks of the chain are held, and no other.
func (r *reader) want(n uint64) {
	r.t.Helper()
	for uint64(len(r.held)) != n {
		if err := r.next(); err != nil {
			r.t.Fatal(err)
		}
	}
	for hash := uint64(1); hash <= n; hash++ {
		if r.held[hash] != 100+hash {
			r.t.Fatalf("%v; want blocks 1 to %d", r.held, n)
		}
	}
}

// end reads until nothing follows, and returns the error of the last event.
func (r *reader) end() transport.Event {
	r.t.Helper()
	for {
		if err := r.next(); errors.Is(err, transport.ErrEnded) {
			return r.events[len(r.events)-1]
		} else if err != nil {
			r.t.Fatal(err)
		}
	}
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
	r := newReader(t, mooncake.Config{Address: m.address(), Interval: time.Millisecond, Contents: contents(chain(3000), func(store func([]feed.Content)) {
		<-stored
		store(chain(4000))
	})})
	r.want(3000)
	if len(r.events) != 1 || r.events[0].Kind != transport.Connected {
		t.Errorf("%+v", r.events)
	}
	close(stored)
	r.want(4000)
	m.set(blocks(2))
	r.want(2)
	m.set(blocks(0))
	r.want(0)
	m.set(func(w http.ResponseWriter, _ *http.Request) { // lines that no block has
		for _, line := range []string{key(1), strings.Repeat("x", 1<<20), strings.Repeat(key(2), 1000), "", "\x00\xff", strings.Repeat("y", 64<<10-1), key(2)} {
			_, _ = io.WriteString(w, line+"\n")
		}
		_, _ = io.WriteString(w, key(3)) // without an end of the line
	})
	r.want(3)
	// Of answers that fail, two are tolerated, and nothing of them is used.
	m.set(blocks(4))
	r.want(4)
	r.gone = 0
	m.set(func(w http.ResponseWriter, _ *http.Request) {
		m.set(func(w http.ResponseWriter, r *http.Request) {
			m.set(blocks(5))
			http.NotFound(w, r)
		})
		w.Header().Set("Content-Length", "1000")
		_, _ = fmt.Fprintln(w, key(1))
	})
	r.want(5)
	if r.gone != 0 {
		t.Errorf("%d blocks were removed", r.gone)
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
			r := newReader(t, mooncake.Config{Address: m.address(), Contents: func(ctx context.Context, pool string, store func([]feed.Content), begun func()) error {
				if !strings.Contains(name, "breaks") && !strings.Contains(name, "break off") {
					t.Error("the contents of blocks are read although there is no list")
				}
				return contents(chain(1), nil)(ctx, pool, store, begun)
			}})
			if e := r.end(); e.Kind != transport.Failed || e.Err == nil || !strings.Contains(e.Err.Error(), c.want) || len(r.held) > 0 {
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
		r := newReader(t, mooncake.Config{Address: raw(t, answer), Contents: contents(chain(1), nil)})
		if e := r.end(); e.Kind != transport.Failed || e.Err == nil || !strings.Contains(e.Err.Error(), want) || len(r.held) > 0 {
			t.Errorf("%+v; want %s", e, want)
		}
	}
}

// TestConnectionsEnd has servers that fail after a list, contents that end, and a reader that interrupts.
func TestConnectionsEnd(t *testing.T) {
	t.Parallel()
	m := newMaster(t)
	m.set(blocks(1))
	r := newReader(t, mooncake.Config{Address: m.address(), Interval: time.Millisecond, Contents: contents(chain(1), nil)})
	r.want(1)
	m.set(http.NotFound)
	if e := r.end(); e.Kind != transport.Disconnected || !strings.Contains(e.Err.Error(), "404") {
		t.Errorf("%+v", e)
	}
	first := r.topic
	m.set(blocks(1))
	r = newReader(t, mooncake.Config{Address: m.address(), Interval: time.Millisecond, Contents: contents(chain(1), nil)})
	if r.want(1); r.topic == first {
		t.Errorf("two connections have the topic %q", first)
	}
	r.Interrupt()
	for err := error(nil); !errors.Is(err, transport.ErrInterrupted); err = r.next() {
		if errors.Is(err, transport.ErrEnded) {
			t.Fatal(err)
		}
	}
	ended := errors.New("the journal has ended")
	for _, begins := range []bool{false, true} {
		r = newReader(t, mooncake.Config{Address: m.address(), Interval: time.Hour, Contents: func(_ context.Context, _ string, _ func([]feed.Content), begun func()) error {
			if begins {
				begun()
			}
			return ended
		}})
		if e := r.end(); !errors.Is(e.Err, ended) {
			t.Errorf("%+v", e)
		}
	}
	r = newReader(t, mooncake.Config{Address: m.address(), Interval: time.Millisecond}) // contents are unknown
	if err := errors.Join(r.next(), r.next()); err != nil || r.topic == "" || len(r.held) > 0 {
		t.Errorf("%v, topic %q, %v", err, r.topic, r.held)
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
		got = append(got, mooncake.ReadGreeting(t.Context(), c) == nil)
		_ = c.Close()
	}
	if want := []bool{true, false, false}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
