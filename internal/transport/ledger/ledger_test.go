package ledger

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

const (
	testGrace   = 40 * time.Millisecond
	testLargest = 16 << 20
	testLimit   = 24 << 20
)

func graceOfTests() time.Duration { return testGrace }

func addressOf(n int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)}), 32)
}

func newState(limit, largest int64) *state {
	return &New(limit, largest, graceOfTests).state
}

// message is a message that arrives in a test.
type message struct {
	*Claim
	name      int
	unread    bool // evict refuses
	evictions int
}

func newMessage(name, address int, bytes int64) *message {
	m := &message{name: name}
	m.Claim = NewClaim(addressOf(address), bytes, func() bool {
		if !m.unread {
			m.evictions++
		}
		return !m.unread
	})
	return m
}

func (m *message) isGranted() bool {
	select {
	case <-m.Granted():
		return true
	default:
		return false
	}
}

// TestState makes, reads, changes and releases claims at random. After each step memory must be bounded, no claim may wait for memory that is
// free, and only stalled messages may be evicted, once.
func TestState(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const limit, largest = 1 << 20, 600 << 10
		s, now := newState(limit, largest), time.Unix(0, 0)
		var all []*message
		draw := func(t *rapid.T, which func(*message) bool) *message {
			var some []*message
			for _, m := range all {
				if which(m) {
					some = append(some, m)
				}
			}
			if len(some) == 0 {
				t.Skip("no claim")
			}
			return rapid.SampledFrom(some).Draw(t, "claim")
		}
		t.Repeat(map[string]func(*rapid.T){
			"request": func(t *rapid.T) {
				bytes := rapid.OneOf(rapid.Int64Range(1, 60<<10), rapid.Int64Range(1, largest)).Draw(t, "bytes")
				m := newMessage(len(all), rapid.IntRange(0, 3).Draw(t, "address"), bytes)
				m.unread = rapid.Bool().Draw(t, "unread")
				all = append(all, m)
				s.request(m.Claim)
			},
			"read": func(t *rapid.T) {
				m := draw(t, func(m *message) bool { return m.incomplete })
				m.Arrived(int(rapid.Int64Range(m.arrived.Load(), m.bytes).Draw(t, "arrived")))
				if m.arrived.Load() == m.bytes {
					s.complete(m.Claim)
				}
			},
			"extend": func(t *rapid.T) {
				m := draw(t, func(m *message) bool { return m.incomplete })
				before := m.bytes
				bytes := rapid.Int64Range(before+1, max(before+1, largest+1)).Draw(t, "bytes")
				if ok := s.extend(m.Claim, bytes); m.bytes != bytes && ok || m.bytes != before && !ok || ok && bytes > largest {
					t.Fatalf("extended from %d to %d of %d bytes: %v", before, m.bytes, bytes, ok)
				}
			},
			"shrink": func(t *rapid.T) {
				m := draw(t, func(m *message) bool { return m.isGranted() && !m.incomplete })
				want := rapid.Int64Range(1, largest).Draw(t, "bytes")
				before := m.bytes
				if s.shrink(m.Claim, want); m.bytes != min(before, want) {
					t.Fatalf("shrunk from %d to %d bytes, want %d", before, m.bytes, min(before, want))
				}
			},
			"release": func(t *rapid.T) {
				m := draw(t, func(*message) bool { return true })
				all = slices.DeleteFunc(all, func(o *message) bool { return o == m })
				s.release(m.Claim)
			},
			"pass": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(0, 500).Draw(t, "ms")) * time.Millisecond)
			},
			"": func(t *rapid.T) {
				stalled, evictions := make(map[*message]bool), make(map[*message]int)
				for _, m := range all {
					stalled[m], evictions[m] = m.incomplete && now.Sub(m.since) >= testGrace && m.rate(now) < minRate, m.evictions
				}
				s.settle(now)
				var sum, large, waiting int64
				for _, m := range all {
					switch {
					case !m.isGranted():
						waiting++
					case m.Claim == s.large:
						large = m.bytes
						fallthrough
					default:
						sum += m.bytes
					}
					if m.evictions > evictions[m] && !stalled[m] || m.evictions > 1 {
						t.Fatalf("message %d is evicted: %d times, stalled: %v", m.name, m.evictions, stalled[m])
					}
				}
				usual := sum - large
				if sum != s.used || large > largest && usual > 0 || usual > limit-largest && len(s.incomplete) > 1 || int(waiting) != len(s.waiting) {
					t.Fatalf("%d bytes are granted, of which a large message has %d; %d are counted; %d claims wait, counted %d",
						sum, large, s.used, waiting, len(s.waiting))
				}
				if c := s.next(true); c != nil && s.large == nil {
					t.Fatalf("a large message of %d bytes waits, and there is none", c.bytes)
				}
				if c := s.next(false); c != nil && usual+c.bytes <= limit-largest {
					t.Fatalf("a message of %d bytes waits, and others use %d", c.bytes, usual)
				}
				if len(all) == 0 && len(s.owners) > 0 {
					t.Fatalf("%d addresses without claims", len(s.owners))
				}
			},
		})
	})
}

// TestBurstIsNotEvicted has messages of many engines arrive at the same time, all of which are read: none may be lost.
func TestBurstIsNotEvicted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, now := newState(testLimit, testLargest), time.Unix(0, 0)
		addresses := rapid.IntRange(1, 200).Draw(t, "addresses")
		var open, processing []*message
		for i := range rapid.IntRange(1, 200).Draw(t, "messages") {
			open = append(open, newMessage(i, i%addresses, rapid.OneOf(rapid.Int64Range(1, 1<<20), rapid.Int64Range(1, testLargest)).Draw(t, "bytes")))
			s.request(open[i].Claim)
		}
		s.settle(now)
		for len(open)+len(processing) > 0 {
			now = now.Add(time.Millisecond)
			before := len(open)
			open = slices.DeleteFunc(open, func(m *message) bool {
				if m.isGranted() {
					m.Arrived(int(min(m.bytes, m.arrived.Load()+1<<18)))
				}
				if m.evictions > 0 {
					t.Fatalf("message %d of %d bytes is evicted", m.name, m.bytes)
				}
				arrived := m.arrived.Load() == m.bytes
				if arrived {
					s.complete(m.Claim)
					processing = append(processing, m)
				}
				return arrived
			})
			if reads := slices.ContainsFunc(open, (*message).isGranted); len(processing) > 3 || !reads && len(open) == before {
				if len(processing) == 0 {
					t.Fatalf("all %d messages wait", len(open))
				}
				s.release(processing[0].Claim)
				processing = processing[1:]
			}
			s.settle(now)
		}
	})
}

// TestHonestMessageBesideAttackers has attackers that announce messages, send some, and stall or bring a byte at a time. They connect again as soon
// as they are evicted. A message of another address must be granted its memory in a short time, again and again.
func TestHonestMessageBesideAttackers(t *testing.T) {
	for _, tt := range []struct {
		addresses, connections int
		announced, sent        int64 // by each
		honest                 int64
		ms                     int
	}{
		{2, 30, 16 << 20, 40_000, 256 << 10, 100},
		{12, 1, 16 << 20, 15 << 20, 256 << 10, 100},
		{40, 30, 1 << 20, 40_000, 256 << 10, 100},
		{40, 30, 512 << 10, 500_000, 256 << 10, 100},
		{40, 1, 1 << 20, 1_000_000, 256 << 10, 600},               // eight of the forty at a time
		{40, 1, 256 << 10, 40_000, 256 << 10, 2 * fairGrace * 40}, // which use no more than it
		{2, 30, 16 << 20, 40_000, 16 << 20, 3 * fairGrace * 40},   // the largest message waits for one of each address
		{2, 2, 2 << 20, 2 << 20, 16 << 20, 3 * fairGrace * 40},    // which ask for less, again and again
	} {
		t.Run(fmt.Sprintf("%d addresses, %d connections, %d of %d bytes, %d", tt.addresses, tt.connections, tt.sent, tt.announced, tt.honest), func(t *testing.T) {
			s, now := newState(testLimit, testLargest), time.Unix(0, 0)
			var attackers []*message
			for i := range tt.addresses * tt.connections {
				attackers = append(attackers, newMessage(i, i%tt.addresses, tt.announced))
				s.request(attackers[i].Claim)
			}
			step := func() {
				now = now.Add(time.Millisecond)
				for i, m := range attackers {
					switch {
					case m.evictions > 0:
						s.release(m.Claim)
						attackers[i] = newMessage(m.name, m.name%tt.addresses, tt.announced)
						s.request(attackers[i].Claim)
					case m.isGranted():
						m.Arrived(int(max(m.arrived.Load()+1, tt.sent)))
					}
				}
				s.settle(now)
			}
			for range 200 {
				step()
			}
			for range 20 {
				honest := newMessage(-1, 5000, tt.honest)
				s.request(honest.Claim)
				s.settle(now)
				waited := 0
				for ; !honest.isGranted(); waited++ {
					step()
				}
				if waited > tt.ms {
					t.Fatalf("granted after %d ms, want at most %d", waited, tt.ms)
				}
				honest.Arrived(int(tt.honest))
				s.complete(honest.Claim)
				step()
				s.release(honest.Claim)
				step()
			}
		})
	}
}

// TestLedgerEvictsInTime checks that a claim waits until another is stalled and its connection has ended.
func TestLedgerEvictsInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New(100, 100, graceOfTests)
		evicted := make(chan struct{})
		stalled := NewClaim(addressOf(1), 60, func() bool { close(evicted); return true })
		l.Request(stalled)
		<-stalled.Granted()
		began := time.Now()
		next := NewClaim(addressOf(2), 50, nil)
		l.Request(next)
		if l.Used() != 60 || l.Waiting() != 1 {
			t.Fatalf("a claim does not wait: %d bytes are used, %d claims wait", l.Used(), l.Waiting())
		}
		<-evicted
		if waited := time.Since(began); waited != testGrace { // its address uses more than the other will
			t.Errorf("evicted after %v, want %v", waited, testGrace)
		}
		select {
		case <-next.Granted():
			t.Error("granted before the connection has ended")
		default:
		}
		l.Release(stalled)
		<-next.Granted()
		l.Release(next)
		if l.Used() != 0 || l.Waiting() != 0 {
			t.Errorf("%d bytes are used, %d claims wait", l.Used(), l.Waiting())
		}
	})
}
