package zmtp_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/zmtp"
)

var start = time.Unix(1000, 0)

// side feeds one Session with the bytes of a peer.
type side struct {
	*zmtp.Session
	now    time.Time
	in     []byte
	events []string
	err    error
}

func newSide(c zmtp.Config) *side { return &side{Session: zmtp.New(c, start), now: start} }

// receive feeds bytes, and records the events.
func (s *side) receive(b []byte) {
	s.in = append(s.in, b...)
	for s.err == nil {
		var e zmtp.Event
		n, err := s.Next(s.now, s.in, &e)
		if err != nil {
			s.err = err
			return
		}
		switch e.Kind {
		case zmtp.Incomplete:
			if need := s.Need(s.in); need <= len(s.in) {
				s.err = errors.New("Need is satisfied, and Next incomplete")
			}
			return
		case zmtp.Established:
			s.events = append(s.events, "established")
		case zmtp.Message:
			s.events = append(s.events, messageText(e.Frames[:min(e.Count, zmtp.KeptFrames)]))
		case zmtp.Subscribe:
			s.events = append(s.events, "subscribe "+string(e.Topic))
		case zmtp.Cancel:
			s.events = append(s.events, "cancel "+string(e.Topic))
		case zmtp.Internal:
		}
		s.in = s.in[n:]
	}
}

func messageText(frames [][]byte) string {
	return "message " + string(bytes.Join(frames, []byte("|")))
}

// peerGreeting returns a greeting with a minor version and a mechanism.
func peerGreeting(minor byte, mechanism string) []byte {
	g := zmtp.AppendGreeting(nil)
	g[11] = minor
	copy(g[12:32], make([]byte, 20))
	copy(g[12:32], mechanism)
	return g
}

func ready(socketType string) []byte {
	data := append([]byte("\x0bSocket-Type"), 0, 0, 0, byte(len(socketType)))
	return zmtp.AppendCommand(nil, "READY", append(data, socketType...)...)
}

// subscriber returns a SUB side whose handshake with a PUB is complete, and which has sent it.
func subscriber(t *testing.T, limits zmtp.Limits) *side {
	t.Helper()
	s := newSide(zmtp.Config{Socket: zmtp.SUB, Topic: "kv@", Limits: limits})
	s.receive(append(peerGreeting(1, "NULL"), ready("PUB")...))
	if s.err != nil || !s.Established() {
		t.Fatalf("handshake: established %v, error %v", s.Established(), s.err)
	}
	s.Out()
	s.events = nil
	return s
}

func TestHandshake(t *testing.T) {
	for _, tt := range []struct {
		name  string
		minor byte
		peer  string
		sent  []byte // after the greeting
	}{
		{"ZMTP 3.1 subscribes by command", 1, "PUB", append(ready("SUB"), zmtp.AppendCommand(nil, "SUBSCRIBE", []byte("kv@")...)...)},
		{"ZMTP 3.0 subscribes by message", 0, "XPUB", append(ready("SUB"), "\x00\x04\x01kv@"...)},
		{"a later minor version is used as 3.1", 7, "PUB", append(ready("SUB"), zmtp.AppendCommand(nil, "SUBSCRIBE", []byte("kv@")...)...)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSide(zmtp.Config{Socket: zmtp.SUB, Topic: "kv@"})
			if got := bytes.Clone(s.Out()); !bytes.Equal(got, zmtp.AppendGreeting(nil)) {
				t.Errorf("first bytes %x, want the greeting", got)
			}
			s.receive(peerGreeting(tt.minor, "NULL"))
			s.receive(ready(tt.peer))
			if s.err != nil || !s.Established() {
				t.Fatalf("established %v, error %v", s.Established(), s.err)
			}
			if got := s.Out(); !bytes.Equal(got, tt.sent) {
				t.Errorf("sent %q, want %q", got, tt.sent)
			}
			if diff := cmp.Diff([]string{"established"}, s.events); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestHandshakeRefused(t *testing.T) {
	tooOld := peerGreeting(0, "NULL")
	tooOld[10] = 1 // ZMTP 2.0
	for _, tt := range []struct {
		name   string
		bytes  []byte
		reason zmtp.Reason
		detail string
	}{
		{"HTTP", []byte("GET / HTTP/1.1\r\n\r\n"), zmtp.ReasonProtocol, "does not speak ZMTP"},
		{"TLS", []byte{0x16, 3, 1}, zmtp.ReasonProtocol, "does not speak ZMTP"},
		{"signature without its last byte", append([]byte{0xff}, make([]byte, 9)...), zmtp.ReasonProtocol, "does not speak ZMTP"},
		{"ZMTP 2.0 at its version", tooOld[:11], zmtp.ReasonVersion, "ZMTP 2.0 or older"},
		{"CURVE", peerGreeting(1, "CURVE"), zmtp.ReasonMechanism, `mechanism "CURVE", want "NULL"`},
		{"PLAIN", peerGreeting(0, "PLAIN"), zmtp.ReasonMechanism, `mechanism "PLAIN", want "NULL"`},
		{"message before READY", append(peerGreeting(1, "NULL"), 0, 0), zmtp.ReasonProtocol, "before READY"},
		{"other command before READY", append(peerGreeting(1, "NULL"), zmtp.AppendCommand(nil, "PING", 0, 0)...), zmtp.ReasonProtocol, `"PING"`},
		{"ERROR", append(peerGreeting(1, "NULL"), zmtp.AppendCommand(nil, "ERROR", append([]byte{3}, "400"...)...)...), zmtp.ReasonRefused, `"400"`},
		{"ERROR without a reason", append(peerGreeting(1, "NULL"), zmtp.AppendCommand(nil, "ERROR")...), zmtp.ReasonRefused, "no reason given"},
		{"wrong socket type", append(peerGreeting(1, "NULL"), ready("PULL")...), zmtp.ReasonSocketType, `"PULL"`},
		{"no socket type", append(peerGreeting(1, "NULL"), zmtp.AppendCommand(nil, "READY")...), zmtp.ReasonSocketType, `""`},
		{"property without a name", append(peerGreeting(1, "NULL"), zmtp.AppendCommand(nil, "READY", 0, 0, 0, 0, 0)...), zmtp.ReasonProtocol, "metadata"},
		{"property beyond the command", append(peerGreeting(1, "NULL"), zmtp.AppendCommand(nil, "READY", 1, 'x', 0xff, 0xff, 0xff, 0xff)...), zmtp.ReasonProtocol, "metadata"},
		{"READY of 2^63 bytes", append(peerGreeting(1, "NULL"), 6, 0x80, 0, 0, 0, 0, 0, 0, 0), zmtp.ReasonBytes, "want at most"},
		{"command without a name", append(peerGreeting(1, "NULL"), 4, 1, 0), zmtp.ReasonProtocol, "malformed command"},
		{"empty command", append(peerGreeting(1, "NULL"), 4, 0), zmtp.ReasonProtocol, "malformed command"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSide(zmtp.Config{Socket: zmtp.SUB})
			s.receive(tt.bytes)
			wantError(t, s.err, tt.reason, tt.detail)
		})
	}
}

func wantError(t *testing.T, err error, reason zmtp.Reason, detail string) {
	t.Helper()
	var e *zmtp.Error
	if !errors.As(err, &e) || e.Reason != reason || !strings.Contains(e.Detail, detail) {
		t.Errorf("got error %#v, want reason %q with %q", err, reason, detail)
	}
}

func TestEstablishedPeerIsRefused(t *testing.T) {
	limits := zmtp.Limits{Frames: 3, Bytes: 1000, Commands: 2}
	more := func(n int) (b []byte) {
		for range n {
			b = zmtp.AppendMore(b, []byte("f"))
		}
		return b
	}
	for _, tt := range []struct {
		name   string
		bytes  []byte
		reason zmtp.Reason
	}{
		{"endless frames", more(4), zmtp.ReasonFrames},
		{"large frame, by its header", []byte{2, 0, 0, 0, 0, 0, 0, 4, 0}, zmtp.ReasonBytes},
		{"frame of 2^64-1 bytes", []byte{2, 255, 255, 255, 255, 255, 255, 255, 255}, zmtp.ReasonBytes},
		{"large message of small frames", zmtp.AppendMore(zmtp.AppendMore(nil, make([]byte, 600)), make([]byte, 600)), zmtp.ReasonBytes},
		{"reserved flag", []byte{8, 0}, zmtp.ReasonProtocol},
		{"command with more", []byte{5, 2, 1, 'x'}, zmtp.ReasonProtocol},
		{"third command", bytes.Repeat(zmtp.AppendCommand(nil, "PING", 0, 0), 3), zmtp.ReasonCommands},
		{"commands within a message", append(more(1), bytes.Repeat(zmtp.AppendCommand(nil, "PING", 0, 0), 3)...), zmtp.ReasonCommands},
		{"PING with a large context", zmtp.AppendCommand(nil, "PING", make([]byte, 19)...), zmtp.ReasonProtocol},
		{"PING without a time to live", zmtp.AppendCommand(nil, "PING", 0), zmtp.ReasonProtocol},
		{"SUBSCRIBE from a publisher", zmtp.AppendCommand(nil, "SUBSCRIBE"), zmtp.ReasonProtocol},
		{"ERROR", zmtp.AppendCommand(nil, "ERROR", 1, 'x'), zmtp.ReasonRefused},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := subscriber(t, limits)
			s.receive(tt.bytes)
			wantError(t, s.err, tt.reason, "")
			if len(s.events) > 0 {
				t.Errorf("events %v before the error", s.events)
			}
		})
	}
}

func TestLimitsAreReached(t *testing.T) {
	s := subscriber(t, zmtp.Limits{Frames: 3, Bytes: 300, Commands: 2})
	ping := zmtp.AppendCommand(nil, "PING", 0, 0, 'c')
	s.receive(zmtp.AppendMessage(nil, []byte("a"), []byte("b"), make([]byte, 270)))
	s.receive(append(bytes.Clone(ping), ping...))
	s.now = s.now.Add(time.Second)
	s.receive(append(bytes.Clone(ping), ping...))
	if s.err != nil || len(s.events) != 1 {
		t.Errorf("events %q, error %v, want one message", s.events, s.err)
	}
	if got, want := s.Out(), bytes.Repeat(zmtp.AppendCommand(nil, "PONG", 'c'), 4); !bytes.Equal(got, want) {
		t.Errorf("sent %q, want %q", got, want)
	}
}

func TestUnknownCommandsAreIgnored(t *testing.T) {
	s := subscriber(t, zmtp.Limits{})
	s.receive(zmtp.AppendCommand(nil, "FUTURE", 1, 2, 3))
	s.receive(zmtp.AppendMessage(nil, []byte("x")))
	if diff := cmp.Diff([]string{"message x"}, s.events); diff != "" || s.err != nil {
		t.Error(s.err, diff)
	}
}

func TestPublisherReadsSubscriptions(t *testing.T) {
	for _, tt := range []struct {
		name  string
		bytes []byte
		want  []string
	}{
		{"commands", append(zmtp.AppendCommand(nil, "SUBSCRIBE", 'k', 'v'), zmtp.AppendCommand(nil, "CANCEL", 'k', 'v')...), []string{"subscribe kv", "cancel kv"}},
		{"messages", zmtp.AppendMessage(zmtp.AppendMessage(nil, []byte("\x01kv")), []byte("\x00kv")), []string{"subscribe kv", "cancel kv"}},
		{"other messages", zmtp.AppendMessage(nil, []byte("\x02")), []string{"message \x02"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSide(zmtp.Config{Socket: zmtp.PUB})
			s.receive(append(peerGreeting(1, "NULL"), ready("SUB")...))
			s.receive(tt.bytes)
			if diff := cmp.Diff(append([]string{"established"}, tt.want...), s.events); diff != "" || s.err != nil {
				t.Error(s.err, diff)
			}
		})
	}
}

func TestSubscriptionsAsMessagesAreLimited(t *testing.T) {
	s := newSide(zmtp.Config{Socket: zmtp.PUB, Limits: zmtp.Limits{Commands: 2}})
	s.receive(append(peerGreeting(1, "NULL"), ready("SUB")...))
	s.receive(bytes.Repeat(zmtp.AppendMessage(nil, []byte("\x01kv")), 2))
	if s.err != nil {
		t.Fatal(s.err)
	}
	s.receive(zmtp.AppendMessage(nil, []byte("\x00kv")))
	wantError(t, s.err, zmtp.ReasonCommands, "2")
}

func TestSilence(t *testing.T) {
	t.Run("in the handshake", func(t *testing.T) {
		s := newSide(zmtp.Config{Socket: zmtp.SUB})
		s.now = start.Add(4 * time.Second)
		s.receive(peerGreeting(1, "NULL")) // bytes do not extend the handshake
		if err := s.Tick(start.Add(5*time.Second - 1)); err != nil {
			t.Fatal(err)
		}
		wantError(t, s.Tick(start.Add(5*time.Second)), zmtp.ReasonHandshake, "5s")
	})
	t.Run("PING and no answer", func(t *testing.T) {
		s := subscriber(t, zmtp.Limits{})
		if err := s.Tick(start.Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if got, want := s.Out(), zmtp.AppendCommand(nil, "PING", 0, 0); !bytes.Equal(got, want) {
			t.Errorf("sent %q, want %q", got, want)
		}
		wantError(t, s.Tick(s.Deadline()), zmtp.ReasonHeartbeat, "10s")
	})
	t.Run("PING that was sent late", func(t *testing.T) {
		s := subscriber(t, zmtp.Limits{})
		s.Sent(start.Add(9 * time.Second)) // no PING
		if err := s.Tick(start.Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		s.Sent(start.Add(25 * time.Second))
		if err := s.Tick(start.Add(35*time.Second - 1)); err != nil {
			t.Fatal(err)
		}
		wantError(t, s.Tick(start.Add(35*time.Second)), zmtp.ReasonHeartbeat, "10s")
	})
	t.Run("PING and PONG", func(t *testing.T) {
		s := subscriber(t, zmtp.Limits{})
		for range 5 {
			s.now = s.Deadline()
			if err := s.Tick(s.now); err != nil {
				t.Fatal(err)
			}
			s.receive(zmtp.AppendCommand(nil, "PONG"))
		}
	})
	t.Run("no PING to ZMTP 3.0", func(t *testing.T) {
		s := newSide(zmtp.Config{Socket: zmtp.SUB})
		s.receive(append(peerGreeting(0, "NULL"), ready("PUB")...))
		if at := s.Deadline(); !at.IsZero() {
			t.Errorf("deadline %v, want none", at)
		}
	})
}

func TestPingHasItsTTL(t *testing.T) {
	for ttl, want := range map[time.Duration][]byte{
		0: {0, 0}, time.Millisecond: {0, 1}, 3 * time.Second: {0, 30}, time.Minute: {2, 88}, time.Hour: {2, 138},
	} {
		if got, want := zmtp.AppendPing(nil, ttl), zmtp.AppendCommand(nil, "PING", want...); !bytes.Equal(got, want) {
			t.Errorf("%v: got %q, want %q", ttl, got, want)
		}
	}
}

// TestChunksDoNotMatter checks that the events and replies do not depend on how the bytes are
// cut, for arbitrary messages with commands between their frames.
func TestChunksDoNotMatter(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stream := append(peerGreeting(1, "NULL"), ready("PUB")...)
		want := []string{"established"}
		for range rapid.IntRange(0, 5).Draw(t, "messages") {
			frames := rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 0, 300), 1, 6).Draw(t, "frames")
			for i, f := range frames {
				if rapid.IntRange(0, 4).Draw(t, "command") == 0 {
					stream = zmtp.AppendCommand(stream, "PING", 0, 0, 'x')
				}
				if i < len(frames)-1 {
					stream = zmtp.AppendMore(stream, f)
				} else {
					stream = zmtp.AppendMessage(stream, f)
				}
			}
			want = append(want, messageText(frames[:min(len(frames), zmtp.KeptFrames)]))
		}
		whole, cut := newSide(zmtp.Config{Socket: zmtp.SUB}), newSide(zmtp.Config{Socket: zmtp.SUB})
		whole.receive(stream)
		var sent []byte
		for rest := stream; len(rest) > 0; {
			n := min(len(rest), rapid.IntRange(1, 400).Draw(t, "chunk"))
			cut.receive(rest[:n])
			sent = append(sent, cut.Out()...)
			rest = rest[n:]
		}
		for _, s := range []*side{whole, cut} {
			if diff := cmp.Diff(want, s.events); diff != "" || s.err != nil {
				t.Fatalf("error %v, events:\n%s", s.err, diff)
			}
		}
		if !bytes.Equal(sent, whole.Out()) {
			t.Fatal("the bytes sent depend on the chunks")
		}
	})
}

// TestByteByByte checks that a handshake and a message arrive when each byte comes alone.
func TestByteByByte(t *testing.T) {
	a, b := newSide(zmtp.Config{Socket: zmtp.PUB}), newSide(zmtp.Config{Socket: zmtp.SUB, Topic: "t"})
	for range 3 {
		for _, c := range bytes.Clone(a.Out()) {
			b.receive([]byte{c})
		}
		for _, c := range bytes.Clone(b.Out()) {
			a.receive([]byte{c})
		}
	}
	for _, c := range zmtp.AppendMessage(nil, []byte("t"), []byte("12345678"), make([]byte, 400)) {
		b.receive([]byte{c})
	}
	if diff := cmp.Diff([]string{"established", "subscribe t"}, a.events); diff != "" || a.err != nil {
		t.Error(a.err, diff)
	}
	if len(b.events) != 2 || b.err != nil {
		t.Errorf("events %q, error %v", b.events, b.err)
	}
}

func FuzzSession(f *testing.F) {
	for _, minor := range []byte{0, 1} {
		handshake := append(peerGreeting(minor, "NULL"), ready("PUB")...)
		f.Add(byte(0), handshake, uint16(7))
		f.Add(byte(0), zmtp.AppendMessage(handshake, []byte("kv@a"), make([]byte, 8), make([]byte, 300)), uint16(64))
		f.Add(byte(0), zmtp.AppendCommand(handshake, "PING", 0, 1, 2), uint16(1))
	}
	for name, stream := range recordings(f) {
		socket := byte(0)
		if strings.HasSuffix(name, "-router") {
			socket = 2
		}
		f.Add(socket, stream, uint16(16))
	}
	f.Add(byte(1), zmtp.AppendCommand(append(peerGreeting(1, "NULL"), ready("SUB")...), "SUBSCRIBE", 'k'), uint16(3))
	sockets := []zmtp.SocketType{zmtp.SUB, zmtp.PUB, zmtp.DEALER, zmtp.ROUTER}
	f.Fuzz(func(t *testing.T, socket byte, stream []byte, chunk uint16) {
		config := zmtp.Config{Socket: sockets[int(socket)%len(sockets)], Limits: zmtp.Limits{Frames: 5, Bytes: 1 << 12, Commands: 20}}
		whole, cut := newSide(config), newSide(config)
		whole.receive(stream)
		for rest := stream; len(rest) > 0; {
			n := min(len(rest), int(chunk)+1)
			cut.receive(rest[:n])
			rest = rest[n:]
		}
		if diff := cmp.Diff(whole.events, cut.events); diff != "" {
			t.Errorf("events depend on the chunks:\n%s", diff)
		}
		if (whole.err == nil) != (cut.err == nil) || whole.err != nil && whole.err.Error() != cut.err.Error() {
			t.Errorf("errors depend on the chunks: %v and %v", whole.err, cut.err)
		}
		var e *zmtp.Error
		if whole.err != nil && !errors.As(whole.err, &e) {
			t.Errorf("error %v is no *zmtp.Error", whole.err)
		}
		if out := len(whole.Out()); out > 64+64+20*32+4096 {
			t.Errorf("%d bytes to send", out)
		}
	})
}

// With Config.Split each frame is a message, however many there are.
func TestSplitMessages(t *testing.T) {
	s := zmtp.New(zmtp.Config{Socket: zmtp.DEALER, Split: true}, start)
	peer := newSide(zmtp.Config{Socket: zmtp.ROUTER})
	self := &side{Session: s, now: start}
	for range 3 {
		self.receive(bytes.Clone(peer.Out()))
		peer.receive(bytes.Clone(self.Out()))
	}
	if !s.Established() {
		t.Fatalf("not established: %v", self.err)
	}
	var message []byte
	for range 99 {
		message = zmtp.AppendCommand(zmtp.AppendMore(message, []byte("a")), "NOTHING")
	}
	message = zmtp.AppendMessage(message, []byte("b"))
	var more, last int
	for len(message) > 0 {
		var e zmtp.Event
		n, err := s.Next(start, message, &e)
		if err != nil {
			t.Fatal(err)
		}
		message = message[n:]
		switch {
		case e.Kind != zmtp.Message:
		case e.Count != 1:
			t.Fatalf("message of %d frames", e.Count)
		case e.More && string(e.Frames[0]) == "a":
			more++
		case !e.More && string(e.Frames[0]) == "b":
			last++
		}
	}
	if more != 99 || last != 1 {
		t.Errorf("%d frames with others after them and %d without, want 99 and 1", more, last)
	}
}
