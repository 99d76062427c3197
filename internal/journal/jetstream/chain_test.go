package jetstream

import (
	"errors"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/journal"
)

// publication is a unit on its way to the stream.
type publication struct {
	expected uint64
	appends  []string
}

// chainWorld is a chain, the stream with the entries of its worker, and what is on its way. The seqs of other workers are
// left out. A fate is unknown as long as the chain has not been told it, and messages may be stored late.
type chainWorld struct {
	chain     *chain
	stream    []string // entry n has the seq n
	delivered int      // entries
	flying    []publication
	pushed    int
	number    uint64
}

func (w *chainWorld) push() {
	w.pushed++
	w.chain.appends = append(w.chain.appends, &inFlight{message: &nats.Msg{Subject: strconv.Itoa(w.pushed)}})
}

func (w *chainWorld) publish(limit int) {
	if !w.chain.isReady() {
		return
	}
	w.number++
	p := publication{expected: w.chain.last}
	for _, a := range w.chain.next(limit, w.number, time.Time{}) {
		p.appends = append(p.appends, a.message.Subject)
	}
	w.flying = append(w.flying, p)
}

// stored returns the appends that the stream has.
func (w *chainWorld) stored() []string {
	return slices.DeleteFunc(slices.Clone(w.stream), func(m string) bool { return m == foreign })
}

// arrive lets the stream store or refuse a publication that is on its way.
func (w *chainWorld) arrive(i int) {
	p := w.flying[i]
	w.flying = slices.Delete(w.flying, i, i+1)
	if p.expected == uint64(len(w.stream)) {
		w.stream = append(w.stream, p.appends...)
	}
}

// check is what a look at the stream does: a unit that is not stored is published again.
func (w *chainWorld) check() {
	if w.chain.unit > 0 && w.chain.last == uint64(len(w.stream)) {
		w.chain.refused()
	}
}

func (w *chainWorld) deliver(t *rapid.T) {
	if w.delivered == len(w.stream) {
		return
	}
	w.delivered++
	got := w.stream[w.delivered-1]
	if got == foreign {
		w.chain.overtaken(uint64(w.delivered))
		return
	}
	a, err := w.chain.delivered(&nats.Msg{Subject: got}, uint64(w.delivered), time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	if got != a.message.Subject {
		t.Fatalf("entry %d is append %s, and append %s is acknowledged", w.delivered, got, a.message.Subject)
	}
}

// foreign stands in chainWorld.stream for a message that kvcast has not written.
const foreign = "foreign"

// TestEachAppendIsStoredOnceInOrder publishes again what may still arrive, while others publish, too.
func TestEachAppendIsStoredOnceInOrder(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		w := &chainWorld{chain: new(chain)}
		t.Repeat(map[string]func(*rapid.T){
			"push":    func(*rapid.T) { w.push() },
			"publish": func(t *rapid.T) { w.publish(rapid.IntRange(1, 4).Draw(t, "limit")) },
			"arrive": func(t *rapid.T) {
				if len(w.flying) > 0 {
					w.arrive(rapid.IntRange(0, len(w.flying)-1).Draw(t, "which"))
				}
			},
			"lose": func(t *rapid.T) {
				if len(w.flying) > 0 {
					i := rapid.IntRange(0, len(w.flying)-1).Draw(t, "which")
					w.flying = slices.Delete(w.flying, i, i+1)
				}
			},
			"foreign": func(*rapid.T) { w.stream = append(w.stream, foreign) },
			"check":   func(*rapid.T) { w.check() },
			"deliver": w.deliver,
			"": func(t *rapid.T) {
				for i, got := range w.stored() {
					if got != strconv.Itoa(i+1) {
						t.Fatalf("append %s is stored as append %d", got, i+1)
					}
				}
			},
		})
		for range 2*w.pushed + 2 { // without faults, all are stored
			for len(w.flying) > 0 {
				w.arrive(0)
			}
			for w.delivered < len(w.stream) {
				w.deliver(t)
			}
			w.check()
			w.publish(4)
		}
		if stored := len(w.stored()); stored != w.pushed {
			t.Fatalf("%d of %d appends are stored", stored, w.pushed)
		}
	})
}

func TestEntryThatWasNotPublishedIsAnError(t *testing.T) {
	t.Parallel()
	w := &chainWorld{chain: &chain{worker: "w"}}
	w.push()
	for range 2 {
		for _, subject := range []string{"1", "other"} {
			if w.chain.sent == 1 && subject == "1" {
				continue
			}
			if _, err := w.chain.delivered(&nats.Msg{Subject: subject}, 1, time.Time{}); !errors.Is(err, journal.ErrFenced) {
				t.Errorf("entry %s, of %d that are published: got %v", subject, w.chain.sent, err)
			}
		}
		w.publish(1)
	}
}

// TestPublishingAgainIsNoProgress refuses a unit once, and delivers it.
func TestPublishingAgainIsNoProgress(t *testing.T) {
	t.Parallel()
	began := time.Now()
	again := began.Add(time.Minute)
	m := &nats.Msg{}
	c := &chain{appends: []*inFlight{{message: m}, {message: m}}}
	c.next(1, 1, began)
	c.refused()
	c.next(1, 2, again)
	if !c.since.Equal(began) || !c.published.Equal(again) {
		t.Errorf("published again: got since %v and published %v, want %v and %v", c.since, c.published, began, again)
	}
	delivered := again.Add(time.Minute)
	if _, err := c.delivered(m, 1, delivered); err != nil {
		t.Fatal(err)
	}
	if !c.since.Equal(delivered) {
		t.Errorf("delivered: got since %v, want %v", c.since, delivered)
	}
}
