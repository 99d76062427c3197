package ingest

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// A scrape that reads slowly does not hold up delivery, nor other workers.
func TestScrapeHoldsNoLockWhileItSends(t *testing.T) {
	t.Parallel()
	c := newWorkerCollector(new(sourceList))
	w := c.add("w")
	ch := make(chan prometheus.Metric)
	go func() {
		defer close(ch)
		c.Collect(ch)
	}()
	for range ch {
		// The next metric is not received before the next iteration.
		if !c.mu.TryLock() {
			t.Error("the workers are locked")
		} else {
			c.mu.Unlock()
		}
		if !w.mu.TryLock() {
			t.Error("the worker is locked")
		} else {
			w.mu.Unlock()
		}
		if t.Failed() {
			break
		}
	}
	for range ch { // until Collect returns
	}
}
