package ingest_test

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/test/harness"
)

// wantMetrics compares metrics by their names and labels, in Prometheus' text form. A metric with
// the value 0 may be absent.
func wantMetrics(t *testing.T, g prometheus.Gatherer, want map[string]float64) {
	t.Helper()
	got := make(map[string]float64)
	for _, s := range harness.Gather(t, g) {
		got[strings.TrimPrefix(s.String(), "kvcast_ingest_")] = s.Value
	}
	for name, v := range want {
		if got[name] != v {
			t.Errorf("%s = %v, want %v", name, got[name], v)
		}
	}
}
