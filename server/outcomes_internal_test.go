package server

import (
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus"
)

// TestOutcomesAreSentWithoutTheMutex has a receiver that needs the mutex before it receives, as a metric of the same registry does.
func TestOutcomesAreSentWithoutTheMutex(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o outcomes
		metrics := make(chan prometheus.Metric)
		go func() {
			o.Collect(metrics)
			close(metrics)
		}()
		synctest.Wait()
		if !o.mu.TryLock() {
			t.Error("the mutex is held while a metric is sent")
		} else {
			o.mu.Unlock()
		}
		for range metrics {
		}
	})
}
