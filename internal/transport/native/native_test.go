package native_test

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/native"
	"github.com/kvcast/kvcast/internal/zmtp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait of the tests.
const patience = time.Minute

// reader reads the messages and events of a Receiver one by one.
type reader struct {
	transport.Receiver
	t     *testing.T
	chunk *transport.Chunk
	next  int // of the chunk's messages
}

func read(t *testing.T) func(r transport.Receiver, err error) *reader {
	return func(r transport.Receiver, err error) *reader {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := r.Close(); err != nil {
				t.Error(err)
			}
		})
		return &reader{Receiver: r, t: t}
	}
}

// event returns the next event. There must be no message before it.
func (r *reader) event() transport.Event {
	r.t.Helper()
	c := r.take()
	if len(c.Events) == 0 {
		r.t.Fatalf("got %d messages, want an event", len(c.Messages))
	}
	r.chunk = nil
	e := c.Events[0]
	r.Recycle(c)
	return e
}

// want fails the test unless the next event is of a kind.
func (r *reader) want(kind transport.EventKind) transport.Event {
	r.t.Helper()
	e := r.event()
	if e.Kind != kind {
		r.t.Fatalf("got event %+v, want kind %d", e, kind)
	}
	return e
}

func (r *reader) take() *transport.Chunk {
	r.t.Helper()
	if r.chunk == nil {
		until := time.Now().Add(patience)
		c, err := r.Next(func() time.Time { return until })
		if err != nil {
			r.t.Fatalf("read: %v", err)
		}
		r.chunk, r.next = c, 0
	}
	return r.chunk
}

// message returns a copy of the next message. There must be no event before it.
func (r *reader) message() (frames [][]byte) {
	r.t.Helper()
	c := r.take()
	if len(c.Events) > 0 {
		r.t.Fatalf("got event %+v, want a message", c.Events[0])
	}
	for _, f := range c.Messages[r.next].Frames {
		frames = append(frames, bytes.Clone(f))
	}
	if r.next++; r.next == len(c.Messages) {
		r.Recycle(c)
		r.chunk = nil
	}
	return frames
}

func never() time.Time { return time.Time{} }

func bind(t *testing.T, c native.Config) (*reader, string) {
	t.Helper()
	return bindTo(t, native.New(c))
}

func bindTo(t *testing.T, tr *native.Transport) (*reader, string) {
	t.Helper()
	r, endpoint, err := tr.Bind("tcp://127.0.0.1:*", nil)
	return read(t)(r, err), strings.TrimPrefix(endpoint, "tcp://")
}

func TestSubscribeFails(t *testing.T) {
	t.Parallel()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	t.Run("no ZMTP", func(t *testing.T) {
		go func() {
			if c, err := l.Accept(); err == nil {
				_, _ = c.Write([]byte("SSH-2.0-OpenSSH_9.6\r\n"))
			}
		}()
		r := read(t)(native.New(native.Config{}).Subscribe("tcp://"+address, "", nil))
		if e := r.want(transport.Failed); !strings.Contains(e.Err.Error(), "does not speak ZMTP") {
			t.Errorf("error %v", e.Err)
		}
	})
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	t.Run("nobody listens", func(t *testing.T) {
		r := read(t)(native.New(native.Config{}).Subscribe("tcp://"+address, "", nil))
		if e := r.want(transport.Failed); !strings.Contains(e.Err.Error(), "refused") {
			t.Errorf("error %v", e.Err)
		}
	})
}

// rawPeer is a connection whose bytes the test writes.
type rawPeer struct {
	net.Conn
	t *testing.T
}

func dial(t *testing.T, address string) *rawPeer {
	t.Helper()
	return dialFrom(t, nil, address)
}

// dialFrom connects from a local address; nil for any.
func dialFrom(t *testing.T, local net.IP, address string) *rawPeer {
	t.Helper()
	c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: local}}).DialContext(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return &rawPeer{c, t}
}

// handshake is what a PUB socket sends first.
func handshake() []byte {
	b := zmtp.AppendGreeting(nil)
	return zmtp.AppendCommand(b, "READY", append([]byte("\x0bSocket-Type\x00\x00\x00\x03"), "PUB"...)...)
}

func (p *rawPeer) write(b []byte) {
	p.t.Helper()
	if _, err := p.Write(b); err != nil {
		p.t.Fatal(err)
	}
}

// answer answers whatever the other side sends, such as PINGs, by PONGs, until the connection ends.
func (p *rawPeer) answer() {
	pong := zmtp.AppendCommand(nil, "PONG")
	b := make([]byte, 4096)
	for {
		if _, err := p.Read(b); err != nil {
			return
		}
		_, _ = p.Write(pong)
	}
}

// closed waits until the other side has closed the connection.
func (p *rawPeer) closed() {
	p.t.Helper()
	_ = p.SetReadDeadline(time.Now().Add(patience))
	b := make([]byte, 4096)
	for {
		if _, err := p.Read(b); errors.Is(err, os.ErrDeadlineExceeded) {
			p.t.Fatal("connection is open")
		} else if err != nil {
			return
		}
	}
}

func TestBytesOneByOne(t *testing.T) {
	t.Parallel()
	r, address := bind(t, native.Config{})
	p := dial(t, address)
	for _, b := range zmtp.AppendMessage(handshake(), []byte("kv@"), []byte("seq"), make([]byte, 300)) {
		p.write([]byte{b})
	}
	r.want(transport.Connected)
	if m := r.message(); len(m) != 3 || len(m[2]) != 300 {
		t.Errorf("got %d frames", len(m))
	}
}

// rejections returns a channel of the reasons of rejections, and the option for it.
func rejections() (chan zmtp.Reason, func(netip.Addr, *zmtp.Error)) {
	c := make(chan zmtp.Reason, 100)
	return c, func(_ netip.Addr, err *zmtp.Error) { c <- err.Reason }
}

func wantReason(t *testing.T, c chan zmtp.Reason, want zmtp.Reason) {
	t.Helper()
	select {
	case got := <-c:
		if got != want {
			t.Errorf("rejected for %q, want %q", got, want)
		}
	case <-time.After(patience):
		t.Fatalf("not rejected, want %q", want)
	}
}

func TestPeerOverALimitIsDisconnected(t *testing.T) {
	t.Parallel()
	reasons, onReject := rejections()
	r, address := bind(t, native.Config{OnReject: onReject, Limits: zmtp.Limits{Bytes: 1 << 20}})
	honest := dial(t, address)
	honest.write(handshake())
	r.want(transport.Connected)
	endless := handshake()
	for range 20 {
		endless = zmtp.AppendMore(endless, []byte("x"))
	}
	for _, tt := range []struct {
		reason      zmtp.Reason
		bytes       []byte
		established bool
	}{
		{zmtp.ReasonProtocol, []byte("GET / HTTP/1.1\r\n"), false},
		{zmtp.ReasonFrames, endless, true},
		{zmtp.ReasonBytes, append(handshake(), 2, 0, 0, 0, 0, 4, 0, 0, 0), true}, // 64 MiB
	} {
		p := dial(t, address)
		p.write(tt.bytes)
		if tt.established {
			r.want(transport.Connected)
		}
		wantReason(t, reasons, tt.reason)
		if tt.established {
			r.want(transport.Disconnected)
		}
		p.closed()
	}
	honest.write(zmtp.AppendMessage(nil, []byte("still here")))
	if m := r.message(); string(m[0]) != "still here" {
		t.Errorf("got %q", m)
	}
}

// TestPeerWithoutAHandshakeIsDisconnected has a peer that sends a part of a handshake. No other peer is there, which might be slow.
func TestPeerWithoutAHandshakeIsDisconnected(t *testing.T) {
	t.Parallel()
	reasons, onReject := rejections()
	_, address := bind(t, native.Config{OnReject: onReject, Limits: zmtp.Limits{Handshake: 100 * time.Millisecond}})
	p := dial(t, address)
	_, _ = p.Write(zmtp.AppendGreeting(nil)) // on a slow machine, the connection is closed before
	wantReason(t, reasons, zmtp.ReasonHandshake)
	p.closed()
}

func TestConnectionsAreLimited(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		config native.Config
		reason zmtp.Reason
	}{
		{native.Config{Connections: 2}, "connections"},
		{native.Config{PerAddress: 2}, "connections_per_address"},
	} {
		t.Run(string(tt.reason), func(t *testing.T) {
			reasons, onReject := rejections()
			tt.config.OnReject = onReject
			r, address := bind(t, tt.config)
			first := dial(t, address)
			first.write(handshake())
			r.want(transport.Connected)
			second := dial(t, address)
			second.write(handshake())
			r.want(transport.Connected)
			dial(t, address).closed()
			wantReason(t, reasons, tt.reason)
			// A place is free again when the event of its connection was processed.
			_ = first.Close()
			r.want(transport.Disconnected)
			dial(t, address).write(handshake())
			r.want(transport.Connected)
		})
	}
}

// TestReaderStopsReadingPeer checks that a peer whose messages are not processed is not read: its
// writes block, and nothing is lost.
func TestReaderStopsReadingPeer(t *testing.T) {
	t.Parallel()
	r, address := bind(t, native.Config{})
	p := dial(t, address)
	p.write(handshake())
	r.want(transport.Connected)
	const messages = 64
	message := zmtp.AppendMessage(nil, make([]byte, 1<<20))
	sent := make(chan int)
	go func() {
		n := 0
		for ; n < messages; n++ { // far more than the buffers of TCP
			if _, err := p.Write(message); err != nil {
				break
			}
		}
		sent <- n
	}()
	r.take()
	select {
	case n := <-sent:
		t.Fatalf("%d MiB were sent to a reader that does not read", n)
	case <-time.After(200 * time.Millisecond): // it cannot end: the reader has two chunks at most
	}
	for range messages {
		if m := r.message(); len(m[0]) != 1<<20 {
			t.Fatalf("message of %d bytes", len(m[0]))
		}
	}
	if n := <-sent; n != messages {
		t.Errorf("sent %d messages", n)
	}
}

func TestInterruptReturnsWhatHasArrived(t *testing.T) {
	t.Parallel()
	r, address := bind(t, native.Config{})
	p := dial(t, address)
	p.write(zmtp.AppendMessage(handshake(), []byte("x")))
	r.want(transport.Connected)
	r.take()
	r.Interrupt()
	if m := r.message(); string(m[0]) != "x" {
		t.Errorf("got %q", m)
	}
	for {
		c, err := r.Next(never)
		if errors.Is(err, transport.ErrInterrupted) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		r.Recycle(c)
	}
	p.closed()
}

func TestNextMeetsItsDeadline(t *testing.T) {
	t.Parallel()
	r, _ := bind(t, native.Config{})
	at := time.Now().Add(time.Millisecond)
	if _, err := r.Next(func() time.Time { return at }); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}
