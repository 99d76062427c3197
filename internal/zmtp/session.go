package zmtp

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// SocketType is a ZeroMQ socket type, as the Socket-Type property has it.
type SocketType string

// The socket types that a Session can have.
const (
	SUB    SocketType = "SUB"
	PUB    SocketType = "PUB"
	DEALER SocketType = "DEALER"
	ROUTER SocketType = "ROUTER"
)

// peerTypes are the types that a peer may have: RFC 28 and RFC 29.
var peerTypes = map[SocketType][]SocketType{
	SUB:    {PUB, "XPUB"},
	PUB:    {SUB, "XSUB"},
	DEALER: {ROUTER, DEALER, "REP"},
	ROUTER: {DEALER, ROUTER, "REQ"},
}

// Limits bound what a peer may send. Zero is the default.
type Limits struct {
	// Frames is the most frames of a message. Default: 16.
	Frames int
	// FrameBytes is the largest body of a frame. Default: 8 MiB.
	FrameBytes int
	// Bytes is the largest size of a message on the wire: frame headers and interleaved commands count. Default: DefaultBytes.
	Bytes int
	// Commands is the most commands in any second, and subscriptions that come as messages. Default: 100.
	Commands int
	// Handshake is how long the handshake may take. Default: 5 s.
	Handshake time.Duration
	// Heartbeat is the silence after which a peer of ZMTP 3.1 gets a PING, and how long it
	// then has to send anything. Default: 10 s. Negative: no PING is sent.
	Heartbeat time.Duration
}

// DefaultBytes is the default of Limits.Bytes.
const DefaultBytes = 8<<20 + 64<<10

func (l Limits) withDefaults() Limits {
	l.Frames = cmp.Or(l.Frames, 16)
	l.FrameBytes = cmp.Or(l.FrameBytes, 8<<20)
	l.Bytes = cmp.Or(l.Bytes, DefaultBytes)
	l.Commands = cmp.Or(l.Commands, 100)
	l.Handshake = cmp.Or(l.Handshake, 5*time.Second)
	l.Heartbeat = cmp.Or(l.Heartbeat, 10*time.Second)
	return l
}

// Config is the configuration of a Session.
type Config struct {
	Socket SocketType
	// Topic is the prefix that a SUB socket subscribes to.
	Topic string
	// Split makes each frame of a message a Message event of its own. Limits.Frames then has no effect, and Limits.Bytes is of a frame.
	Split  bool
	Limits Limits
}

// EventKind is the kind of an Event.
type EventKind uint8

// The kinds.
const (
	// Incomplete: the bytes have no whole event.
	Incomplete EventKind = iota
	// Internal: the Session has processed the bytes itself.
	Internal
	// Established: the handshake is complete.
	Established
	// Message: Frames and Count are set.
	Message
	// Subscribe and Cancel: a peer of a PUB socket subscribes to Topic, or cancels that.
	Subscribe
	Cancel
)

// KeptFrames is how many frames of a message an Event has.
const KeptFrames = 4

// Event is what a peer sent.
type Event struct {
	Kind EventKind
	// Frames are the first frames of a message: views of the bytes given to Next.
	Frames [KeptFrames][]byte
	// Count is the number of all frames of the message.
	Count int
	// More reports whether the message has further frames, if they are split.
	More bool
	// Topic is a view of the bytes given to Next.
	Topic []byte
}

// phase is how far a Session has come.
type phase uint8

const (
	greeting phase = iota
	handshake
	established
)

// Session is one side of a connection. It is not safe for concurrent use.
type Session struct {
	config Config
	limits Limits
	phase  phase
	minor  byte // the peer's minor version
	out    []byte

	// What of an incomplete message was decoded, so that no byte is decoded twice. Offsets are relative to the first byte of the message.
	scanned int
	frames  int
	spans   [KeptFrames]span

	// commands counts the commands since the beginning of a second.
	commands int
	second   time.Time
	heard    time.Time // the last bytes arrived, or the Session was made
	pinged   bool      // a PING was sent since
}

// span is the place of a frame's body.
type span struct{ from, to int }

// New returns a Session of a new connection. The bytes to send begin with the greeting.
func New(c Config, now time.Time) *Session {
	return &Session{config: c, limits: c.Limits.withDefaults(), out: AppendGreeting(nil), heard: now}
}

// Out returns the bytes to send since the last call. They are valid until the next call of another method.
func (s *Session) Out() []byte {
	out := s.out
	s.out = s.out[:0]
	return out
}

// Established reports whether the handshake is complete.
func (s *Session) Established() bool { return s.phase == established }

// AnswersPings reports whether the peer knows PINGs: ZMTP 3.1. It is set with the first bytes of the peer.
func (s *Session) AnswersPings() bool { return s.minor > 0 }

// Deadline returns the time at which Tick must be called. The zero time means never.
func (s *Session) Deadline() time.Time {
	switch {
	case s.phase != established:
		return s.heard.Add(s.limits.Handshake)
	case !s.AnswersPings() || s.limits.Heartbeat < 0:
		return time.Time{}
	default:
		return s.heard.Add(s.limits.Heartbeat)
	}
}

// Tick processes that time has passed without bytes from the peer: it sends a PING, or returns an *Error.
func (s *Session) Tick(now time.Time) error {
	if at := s.Deadline(); at.IsZero() || now.Before(at) {
		return nil
	}
	switch {
	case s.phase != established:
		return &Error{ReasonHandshake, fmt.Sprintf("handshake not completed within %v", s.limits.Handshake)}
	case s.pinged:
		return &Error{ReasonHeartbeat, fmt.Sprintf("peer sent nothing within %v of a PING", s.limits.Heartbeat)}
	}
	s.out = AppendPing(s.out, 0)
	s.heard, s.pinged = now, true
	return nil
}

// Sent processes that the bytes of Out were sent: from then on, the peer has time to answer a PING. A PING may wait behind
// other data that the peer reads slowly.
func (s *Session) Sent(now time.Time) {
	if s.pinged {
		s.heard = now
	}
}

// Next decodes the first event of in into e, and returns the number of its bytes. The next call must begin with the byte after them. If in
// has no whole event, e is Incomplete and the number is 0: the next call must begin with the same bytes, followed by more.
//
// A non-nil error is an *Error, and final.
func (s *Session) Next(now time.Time, in []byte, e *Event) (int, error) {
	e.Kind = Incomplete
	if s.phase == established {
		s.heard, s.pinged = now, false
		return s.message(now, in, e)
	}
	if s.phase == greeting {
		return s.greeting(in, e)
	}
	return s.handshake(now, in, e)
}

// Need returns how many bytes the next event has at least, counted from the byte at which it begins.
func (s *Session) Need(in []byte) int {
	if s.phase == greeting {
		return GreetingBytes
	}
	if len(in) < s.scanned {
		return s.scanned + 2
	}
	h, ok := parseHeader(in[s.scanned:])
	if !ok {
		return s.scanned + 9
	}
	return s.scanned + h.bytes + int(min(h.size, uint64(s.limits.Bytes)))
}

func (s *Session) greeting(in []byte, e *Event) (int, error) {
	if err := CheckGreeting(in[:min(len(in), GreetingBytes)]); err != nil {
		return 0, err
	}
	if len(in) < GreetingBytes {
		return 0, nil
	}
	s.minor = min(in[minorAt], minorVersion)
	if in[majorAt] > majorVersion {
		s.minor = minorVersion
	}
	s.phase = handshake
	s.out = appendReady(s.out, s.config.Socket)
	e.Kind = Internal
	return GreetingBytes, nil
}

// handshake processes the first frame after the greeting: READY or ERROR.
func (s *Session) handshake(now time.Time, in []byte, e *Event) (int, error) {
	h, ok := parseHeader(in)
	if !ok {
		return 0, nil
	}
	if h.flags&^flagLong != flagCommand {
		return 0, &Error{ReasonProtocol, "peer sent a message before READY"}
	}
	if h.size > maxMetadataBytes {
		return 0, &Error{ReasonBytes, fmt.Sprintf("command of %d bytes before READY, want at most %d", h.size, maxMetadataBytes)}
	}
	end := h.bytes + int(h.size)
	if len(in) < end {
		return 0, nil
	}
	name, data, err := splitCommand(in[h.bytes:end])
	if err != nil {
		return 0, err
	}
	switch string(name) {
	case "READY":
	case "ERROR":
		return 0, refused(data)
	default:
		return 0, &Error{ReasonProtocol, fmt.Sprintf("peer sent command %q, want READY", shorten(name))}
	}
	peer, err := parseReady(data)
	if err != nil {
		return 0, err
	}
	if !slices.Contains(peerTypes[s.config.Socket], peer) {
		return 0, &Error{ReasonSocketType, fmt.Sprintf("peer has socket type %q, want one of %q", shorten([]byte(peer)), peerTypes[s.config.Socket])}
	}
	s.phase, s.heard = established, now
	if s.config.Socket == SUB {
		s.subscribe()
	}
	e.Kind = Established
	return end, nil
}

// subscribe sends the subscription: as a command since ZMTP 3.1, as a message before.
func (s *Session) subscribe() {
	if s.minor > 0 {
		s.out = AppendCommand(s.out, "SUBSCRIBE", []byte(s.config.Topic)...)
	} else {
		s.out = AppendMessage(s.out, append([]byte{1}, s.config.Topic...))
	}
}

// message decodes the frames of one message, or one command. Commands may come between the
// frames of a message: libzmq sends a PING whenever its timer fires.
func (s *Session) message(now time.Time, in []byte, e *Event) (int, error) {
	for {
		h, ok := parseHeader(in[s.scanned:])
		if !ok {
			return 0, nil
		}
		if err := s.checkFrame(h); err != nil {
			return 0, err
		}
		from := s.scanned + h.bytes
		to := from + int(h.size)
		if to > len(in) {
			return 0, nil
		}
		if h.flags&flagCommand != 0 {
			if err := s.command(now, in[from:to], e); err != nil {
				return 0, err
			}
			if s.frames == 0 {
				return to, nil
			}
			s.scanned = to
			continue
		}
		if s.frames < KeptFrames {
			s.spans[s.frames] = span{from, to}
		}
		s.frames++
		s.scanned = to
		if h.flags&flagMore == 0 || s.config.Split {
			e.More = h.flags&flagMore != 0
			return to, s.complete(now, in, e)
		}
	}
}

// checkFrame checks a frame's header, before its body has arrived.
func (s *Session) checkFrame(h frameHeader) error {
	switch {
	case h.flags&^flagsKnown != 0, h.flags&flagCommand != 0 && h.flags&flagMore != 0:
		return &Error{ReasonProtocol, fmt.Sprintf("frame has invalid flags %#02x", h.flags)}
	case h.flags&flagCommand == 0 && s.frames >= s.limits.Frames:
		return &Error{ReasonFrames, fmt.Sprintf("message has more than %d frames", s.limits.Frames)}
	case h.size > uint64(s.limits.FrameBytes):
		return &Error{ReasonBytes, fmt.Sprintf("frame of %d bytes, want at most %d", h.size, s.limits.FrameBytes)}
	case h.size > uint64(s.limits.Bytes-s.scanned):
		return &Error{ReasonBytes, fmt.Sprintf("message of at least %d bytes, want at most %d", uint64(s.scanned)+h.size, s.limits.Bytes)}
	case h.flags&flagCommand != 0 && h.size > maxMetadataBytes:
		return &Error{ReasonBytes, fmt.Sprintf("command has more than %d bytes", maxMetadataBytes)}
	}
	return nil
}

// complete sets the event of a whole message.
func (s *Session) complete(now time.Time, in []byte, e *Event) error {
	e.Kind, e.Count = Message, s.frames
	for i := range e.Frames {
		e.Frames[i] = nil
		if i < s.frames {
			e.Frames[i] = in[s.spans[i].from:s.spans[i].to:s.spans[i].to]
		}
	}
	s.frames, s.scanned = 0, 0
	if s.config.Socket != PUB || e.Count != 1 || len(e.Frames[0]) == 0 {
		return nil
	}
	switch e.Topic = e.Frames[0][1:]; e.Frames[0][0] {
	case 0:
		e.Kind = Cancel
	case 1:
		e.Kind = Subscribe
	default:
		return nil
	}
	return s.countCommand(now)
}

// command processes a command after the handshake. Unknown commands are ignored.
func (s *Session) command(now time.Time, body []byte, e *Event) error {
	if err := s.countCommand(now); err != nil {
		return err
	}
	name, data, err := splitCommand(body)
	if err != nil {
		return err
	}
	e.Kind = Internal
	switch string(name) {
	case "PING":
		return s.ping(data)
	case "SUBSCRIBE", "CANCEL":
		if s.config.Socket != PUB || s.frames > 0 {
			return &Error{ReasonProtocol, fmt.Sprintf("unexpected command %s", name)}
		}
		e.Kind, e.Topic = Subscribe, data
		if string(name) == "CANCEL" {
			e.Kind = Cancel
		}
	case "ERROR":
		return refused(data)
	}
	return nil
}

func (s *Session) countCommand(now time.Time) error {
	if now.Sub(s.second) >= time.Second {
		s.commands, s.second = 0, now
	}
	if s.commands++; s.commands > s.limits.Commands {
		return &Error{ReasonCommands, fmt.Sprintf("peer sent more than %d commands in a second", s.limits.Commands)}
	}
	return nil
}

// maxContextBytes is the largest context of a PING: RFC 37.
const maxContextBytes = 16

// ping answers a PING: two bytes of time to live, which only the peer's silence needs, and the context, which the PONG returns.
func (s *Session) ping(data []byte) error {
	if len(data) < 2 || len(data) > 2+maxContextBytes {
		return &Error{ReasonProtocol, fmt.Sprintf("PING of %d bytes, want 2 to %d", len(data), 2+maxContextBytes)}
	}
	s.out = AppendCommand(s.out, "PONG", data[2:]...)
	return nil
}

// splitCommand splits the body of a command.
func splitCommand(body []byte) (name, data []byte, err error) {
	if len(body) == 0 || body[0] == 0 || int(body[0]) > len(body)-1 {
		return nil, nil, &Error{ReasonProtocol, "malformed command"}
	}
	n := 1 + int(body[0])
	return body[1:n], body[n:], nil
}

// refused returns the error of a peer's ERROR command.
func refused(data []byte) error {
	reason := "no reason given"
	if len(data) > 0 && int(data[0]) <= len(data)-1 && data[0] > 0 {
		reason = fmt.Sprintf("%q", shorten(data[1:1+int(data[0])]))
	}
	return &Error{ReasonRefused, "peer refused the connection: " + reason}
}

// shorten bounds what a peer can write into a log.
func shorten(text []byte) []byte { return text[:min(len(text), 100)] }
