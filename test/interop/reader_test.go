package interop_test

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/native"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/test/harness"
)

// received is a message or an event.
type received struct {
	event  transport.Event // Kind is 0 for a message
	frames [][]byte        // at most transport.KeptFrames
	count  int             // of all frames
}

// reader reads a Receiver.
type reader struct {
	transport.Receiver
	t     *testing.T
	queue []received
}

func newReader(t *testing.T, r transport.Receiver) *reader {
	t.Helper()
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return &reader{Receiver: r, t: t}
}

// before returns the next message or event, if one arrives in time.
func (r *reader) before(at time.Time) (_ received, ok bool) {
	r.t.Helper()
	for len(r.queue) == 0 {
		c, err := r.Next(func() time.Time { return at })
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return received{}, false
		}
		if err != nil {
			r.t.Fatalf("receive: %v", err)
		}
		c.Each(
			func(e transport.Event) { r.queue = append(r.queue, received{event: e}) },
			func(m transport.Message) {
				got := received{count: m.Count}
				for _, f := range m.Frames {
					got.frames = append(got.frames, bytes.Clone(f))
				}
				r.queue = append(r.queue, got)
			})
		r.Recycle(c)
	}
	next := r.queue[0]
	r.queue = r.queue[1:]
	return next, true
}

// next returns the next message or event.
func (r *reader) next() received {
	r.t.Helper()
	got, ok := r.before(time.Now().Add(harness.Timeout))
	if !ok {
		r.t.Fatal("nothing arrives")
	}
	return got
}

// want fails the test unless the next event or message is an event of a kind.
func (r *reader) want(kind transport.EventKind) transport.Event {
	r.t.Helper()
	got := r.next()
	if got.event.Kind != kind {
		r.t.Fatalf("got event %+v and %d frames, want an event of kind %d", got.event, got.count, kind)
	}
	return got.event
}

// wantMessage fails the test unless the next event or message is the message that a peer publishes
// with these arguments.
func (r *reader) wantMessage(first string, sizes ...int) {
	r.t.Helper()
	got := r.next()
	for got.event.Kind == transport.Connected { // a peer may connect once more
		got = r.next()
	}
	if got.event.Kind != 0 || got.count != 1+len(sizes) || string(got.frames[0]) != first {
		r.t.Fatalf("got event %+v, frames %.20q, want %s and %d frames", got.event, got.frames, first, len(sizes))
	}
	for i, f := range got.frames[1:] {
		if !bytes.Equal(f, frame(sizes[i])) {
			r.t.Fatalf("message %s: frame %d of %d bytes is wrong, want %d bytes", first, i+1, len(f), sizes[i])
		}
	}
}

// wantReason fails the test unless the next event or message is the end of a connection for a reason.
func (r *reader) wantReason(reason zmtp.Reason) {
	r.t.Helper()
	e := r.want(transport.Disconnected)
	if why := (*zmtp.Error)(nil); !errors.As(e.Err, &why) || why.Reason != reason {
		r.t.Errorf("disconnected by %v, want reason %q", e.Err, reason)
	}
}

// synchronize publishes until a message arrives, for a time: a publisher does not know when it is
// subscribed to. Events before it are skipped.
func synchronize(t *testing.T, p *peer, r *reader, patience time.Duration) (arrived bool) {
	t.Helper()
	const first, pause = "kv@sync", 10 * time.Millisecond
	deadline := time.Now().Add(patience)
	for sent := 1; ; sent++ {
		if time.Now().After(deadline) {
			return false
		}
		p.publish(first, sent)
		got, ok := r.before(time.Now().Add(pause))
		for ok && got.event.Kind != 0 {
			got, ok = r.before(time.Now().Add(pause))
		}
		if !ok {
			continue
		}
		if got.count != 2 || string(got.frames[0]) != first {
			t.Fatalf("got frames %.20q", got.frames)
		}
		for n := len(got.frames[1]) + 1; n <= sent; n++ {
			r.wantMessage(first, n)
		}
		return true
	}
}

// side is which side connects.
type side string

const (
	weConnect   side = "kvcast connects"
	theyConnect side = "the peer connects"
)

var sides = []side{weConnect, theyConnect}

// setup is how a peer and a Receiver are connected.
type setup struct {
	side      side
	endpoint  string            // to bind to; default: tcp://127.0.0.1:*
	transport *native.Transport // default: with the default limits
	heartbeat time.Duration     // of the peer
	relayed   bool
	pass      int // bytes that the relay passes from the peer; 0 for all
}

// link is a peer and a Receiver that are connected, directly or by a relay.
type link struct {
	setup
	*peer
	*reader
	library library
	relay   *relay
	target  string // what the connecting side connects to
}

// open starts a peer, and connects it.
func (l library) open(t *testing.T, s setup) *link {
	t.Helper()
	if s.endpoint == "" {
		s.endpoint = "tcp://127.0.0.1:*"
	}
	if s.transport == nil {
		s.transport = native.New(native.Config{})
	}
	k := &link{setup: s, library: l}
	if s.side == theyConnect {
		r, bound, err := s.transport.Bind(s.endpoint, nil)
		if err != nil {
			t.Fatal(err)
		}
		k.reader, k.target = newReader(t, r), bound
	} else {
		k.peer = l.start(t, arguments{"pub", "bind", strings.Replace(s.endpoint, "*", "0", 1), s.heartbeat})
		k.target = k.peer.endpoint
	}
	if s.relayed {
		k.relay = newRelay(t, k.target, s.side, s.pass)
		k.target = k.relay.endpoint()
	}
	k.connect(t)
	k.synchronize(t)
	return k
}

// synchronize waits until the peer's messages arrive. A peer whose connection hangs is replaced.
func (k *link) synchronize(t *testing.T) {
	t.Helper()
	if k.side == theyConnect && k.library.can&hangs != 0 {
		// The transport gives up a handshake earlier than this.
		const patience, attempts = 10 * time.Second, 10
		for range attempts {
			if synchronize(t, k.peer, k.reader, patience) {
				return
			}
			t.Log("the peer's connection hangs: another peer takes its place")
			k.kill()
			k.connect(t)
		}
	}
	if !synchronize(t, k.peer, k.reader, harness.Timeout) {
		t.Fatal("no message arrives")
	}
}

// connect makes the connecting side anew.
func (k *link) connect(t *testing.T) {
	t.Helper()
	if k.side == theyConnect {
		k.peer = k.library.start(t, arguments{"pub", "connect", k.target, k.heartbeat})
		return
	}
	r, err := k.transport.Subscribe(k.target, "kv@", nil)
	if err != nil {
		t.Fatal(err)
	}
	k.reader = newReader(t, r)
}
