package bench_test

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// observer measures when entries arrive at a subscriber. All times are from this machine's clock.
type observer struct {
	mu        sync.Mutex // guards all below
	last      time.Time  // arrival of the previous entry
	gaps      []time.Duration
	latencies []time.Duration // from just before the send to the arrival of the response
	reads     []time.Duration // from just before the send to when the server had read the batch
}

// observe handles one message of a subscriber.
func (o *observer) observe(raw []byte, at time.Time) error {
	var m kvcastv1.SubscribeResponse
	if err := proto.Unmarshal(raw, &m); err != nil {
		return fmt.Errorf("decode entries: %w", err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, e := range m.GetEntries() {
		sent := time.Unix(0, e.GetEngineTimeUnixNano())
		o.latencies = append(o.latencies, at.Sub(sent))
		o.reads = append(o.reads, time.Unix(0, e.GetIngestTimeUnixNano()).Sub(sent))
		if !o.last.IsZero() {
			o.gaps = append(o.gaps, at.Sub(o.last))
		}
		o.last = at
	}
	return nil
}

// restart discards all measurements.
func (o *observer) restart() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.last = time.Time{}
	o.gaps, o.latencies, o.reads = o.gaps[:0], o.latencies[:0], o.reads[:0]
}

// times are the measurements of an observer, each sorted.
type times struct{ gaps, latencies, reads []time.Duration }

// seen returns the measurements, or an error unless there were n entries.
func (o *observer) seen(n int) (times, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.latencies) != n {
		return times{}, fmt.Errorf("check observer: it saw %d entries, want %d", len(o.latencies), n)
	}
	t := times{slices.Clone(o.gaps), slices.Clone(o.latencies), slices.Clone(o.reads)}
	for _, d := range [][]time.Duration{t.gaps, t.latencies, t.reads} {
		slices.Sort(d)
	}
	return t, nil
}

// quantile returns a quantile of a sorted list, or 0 if it is empty.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[int(q*float64(len(sorted)-1)+0.5)]
}

func microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
