// Package loglimit limits the log lines that peers can cause.
//
// All lines of a process pass through one Handler, so that no line needs a limit of its own. Lines with the same message and the same
// attribute reason are a kind. A Handler limits the lines of each kind and, among these, the lines about each subject: the address of a peer if
// the line has one, otherwise the worker, otherwise the pod. Peers choose the names of workers, and may have many addresses: the lines of a
// kind are bounded whatever they choose. Lines about calls of operators have the limit of the kind only.
//
// Messages are constants: what varies is an attribute.
package loglimit

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/kvcast/kvcast/internal/budget"
)

const (
	// Burst is how many lines of a kind about one subject are logged at once.
	Burst = 32
	// Interval is the time after which another line of a kind about one subject is logged.
	Interval = 10 * time.Second
	// KindBurst is how many lines of a kind are logged at once, so that each of as many workers has its line at a start.
	KindBurst = 1024
	// KindInterval is the time after which another line of a kind is logged.
	KindInterval = time.Second
	// maxKinds bounds the kinds. All further lines are of one kind.
	maxKinds = 1024
	// maxSubjects bounds the subjects of a kind. Lines about further ones count as lines about one subject.
	maxSubjects = KindBurst
)

// PeerAddress is the attribute with the address of a peer, with or without a port.
const PeerAddress = "peer.address"

// reason is the attribute that makes lines of one message be of several kinds. Its values are constants.
const reason = "reason"

// suppressed is the attribute with the number of lines of the kind, about any subject, that were left out since the last line of the kind.
const suppressed = "suppressed"

// subject is what a line is about: an attribute and its value. The zero value is that of all lines without one.
type subject struct {
	attribute attribute
	value     string
}

// attribute is an attribute that makes a line be about a subject. Those with higher values take precedence.
type attribute uint8

const (
	none attribute = iota
	pod
	worker
	peer
	operator
	anyOther // than the subjects that have limits of their own
)

// with returns the subject of a line with another attribute.
func (s subject) with(a slog.Attr) subject {
	other := none
	switch a.Key {
	case "pod":
		other = pod
	case "worker":
		other = worker
	case PeerAddress:
		other = peer
	case "role":
		if a.Value.String() == "operator" {
			other = operator
		}
	}
	if other <= s.attribute {
		return s
	}
	value := a.Value.String()
	if other == peer {
		value = prefixOf(value)
	}
	return subject{other, value}
}

// prefixOf returns the prefix that limits by address count; the text if it is not an address.
func prefixOf(text string) string {
	ip, err := netip.ParseAddr(text)
	if err != nil {
		port, err := netip.ParseAddrPort(text)
		if err != nil {
			return text
		}
		ip = port.Addr()
	}
	return budget.AddressOf(ip).String()
}

// Handler is a slog.Handler that leaves out lines above the limits. The next line of the kind has their number.
type Handler struct {
	next    slog.Handler
	subject subject // of WithAttrs
	kinds   *kinds
}

// NewHandler returns a Handler that passes lines on.
func NewHandler(next slog.Handler) Handler {
	return Handler{next: next, kinds: &kinds{byName: make(map[kindName]*kind)}}
}

// Enabled implements slog.Handler.
func (h Handler) Enabled(ctx context.Context, l slog.Level) bool { return h.next.Enabled(ctx, l) }

// Handle implements slog.Handler.
func (h Handler) Handle(ctx context.Context, r slog.Record) error {
	about, name := h.subject, kindName{message: r.Message}
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == reason {
			name.reason = a.Value.String()
		}
		about = about.with(a)
		return true
	})
	n, ok := h.kinds.allow(name, about, time.Now())
	if !ok {
		return nil
	}
	if n > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Int(suppressed, n))
	}
	return h.next.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h Handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	for _, a := range attrs {
		h.subject = h.subject.with(a)
	}
	h.next = h.next.WithAttrs(attrs)
	return h
}

// WithGroup implements slog.Handler.
func (h Handler) WithGroup(name string) slog.Handler {
	h.next = h.next.WithGroup(name)
	return h
}

// kinds are the limits of all lines.
type kinds struct {
	mu     sync.Mutex // guards all below
	byName map[kindName]*kind
}

type kindName struct{ message, reason string }

// kind are the limits of the lines of one kind.
type kind struct {
	all        bucket
	subjects   map[subject]*bucket
	swept      time.Time // when full buckets of subjects were removed
	suppressed int
}

// allow reports whether a line may be logged, and how many of its kind were left out before.
func (k *kinds) allow(name kindName, about subject, now time.Time) (suppressed int, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	of := k.byName[name]
	if of == nil && len(k.byName) >= maxKinds {
		name = kindName{}
		of = k.byName[name]
	}
	if of == nil {
		of = &kind{subjects: make(map[subject]*bucket)}
		k.byName[name] = of
	}
	limited := about.attribute != operator
	if limited && !of.bucketOf(about, now).take(now, Burst, Interval) || !of.all.take(now, KindBurst, KindInterval) {
		of.suppressed++
		return 0, false
	}
	suppressed, of.suppressed = of.suppressed, 0
	return suppressed, true
}

// bucketOf returns the bucket of a subject, or the one that subjects share if there are too many.
func (k *kind) bucketOf(about subject, now time.Time) *bucket {
	if b := k.subjects[about]; b != nil {
		return b
	}
	if len(k.subjects) >= maxSubjects && now.Sub(k.swept) >= Interval {
		k.swept = now
		for s, b := range k.subjects {
			if b.tokens(now, Burst, Interval) == Burst {
				delete(k.subjects, s)
			}
		}
	}
	if len(k.subjects) >= maxSubjects {
		about = subject{attribute: anyOther}
		if b := k.subjects[about]; b != nil {
			return b
		}
	}
	b := new(bucket)
	k.subjects[about] = b
	return b
}

// bucket is a token bucket. The zero value is full.
type bucket struct {
	used int       // tokens that are missing
	at   time.Time // when the last token came back
}

// tokens returns how many tokens a bucket of some has, if one comes back in each interval.
func (b *bucket) tokens(now time.Time, size int, each time.Duration) int {
	if b.used > 0 {
		back := min(int(now.Sub(b.at)/each), b.used)
		b.used -= back
		b.at = b.at.Add(time.Duration(back) * each)
	}
	return size - b.used
}

// take takes a token, and reports whether there was one.
func (b *bucket) take(now time.Time, size int, each time.Duration) bool {
	if b.tokens(now, size, each) == 0 {
		return false
	}
	if b.used == 0 {
		b.at = now
	}
	b.used++
	return true
}
