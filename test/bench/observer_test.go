package bench_test

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// observer follows the times of entries at a subscriber. All clocks are this
// machine's one.
type observer struct {
	mu    sync.Mutex // guards all below
	last  time.Time  // when the entry before came
	gaps  []time.Duration
	ways  []time.Duration // from just before the send to when the response was there
	reads []time.Duration // from just before the send to when the server had read it
}

// observe is for a subscriber.
func (o *observer) observe(raw []byte, at time.Time) error {
	var m kvcastv1.SubscribeResponse
	if err := proto.Unmarshal(raw, &m); err != nil {
		return fmt.Errorf("decode entries: %w", err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, e := range m.GetEntries() {
		sent := time.Unix(0, e.GetEngineTimeUnixNano())
		o.ways = append(o.ways, at.Sub(sent))
		o.reads = append(o.reads, time.Unix(0, e.GetIngestTimeUnixNano()).Sub(sent))
		if !o.last.IsZero() {
			o.gaps = append(o.gaps, at.Sub(o.last))
		}
		o.last = at
	}
	return nil
}

// restart forgets what has been.
func (o *observer) restart() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.last = time.Time{}
	o.gaps, o.ways, o.reads = o.gaps[:0], o.ways[:0], o.reads[:0]
}

// times is what an observer has seen, each in order of size.
type times struct{ gaps, ways, reads []time.Duration }

// seen is an error unless there were n entries.
func (o *observer) seen(n int) (times, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.ways) != n {
		return times{}, fmt.Errorf("check observer: it saw %d entries, want %d", len(o.ways), n)
	}
	t := times{slices.Clone(o.gaps), slices.Clone(o.ways), slices.Clone(o.reads)}
	for _, d := range [][]time.Duration{t.gaps, t.ways, t.reads} {
		slices.Sort(d)
	}
	return t, nil
}

// quantile is a value of a sorted list, 0 where it is empty.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[int(q*float64(len(sorted)-1)+0.5)]
}

func microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
