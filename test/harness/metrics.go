package harness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// Metrics are the samples of a registry at one time.
type Metrics []Sample

// Sample is a value of a metric. The value of a histogram or summary is its count.
type Sample struct {
	Name   string
	Labels map[string]string
	Value  float64
}

// String returns the name and labels in the Prometheus text format.
func (s Sample) String() string {
	if len(s.Labels) == 0 {
		return s.Name
	}
	var labels []string
	for _, name := range slices.Sorted(maps.Keys(s.Labels)) {
		labels = append(labels, fmt.Sprintf("%s=%q", name, s.Labels[name]))
	}
	return s.Name + "{" + strings.Join(labels, ",") + "}"
}

// Fataler is a *testing.T, *testing.B or *rapid.T.
type Fataler interface {
	Helper()
	Fatal(args ...any)
}

// Gather returns the samples of a registry.
func Gather(t Fataler, g prometheus.Gatherer) Metrics {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var m Metrics
	for _, f := range families {
		m = m.add(f)
	}
	return m
}

// GatherFrom returns the samples of one collector, and checks that it describes and collects
// consistently.
func GatherFrom(t Fataler, c prometheus.Collector) Metrics {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	if err := registry.Register(c); err != nil {
		t.Fatal(err)
	}
	return Gather(t, registry)
}

// metricsPath is the path of the metrics at the admin port.
const metricsPath = "/metrics"

// parseMetrics parses metrics in the Prometheus text format.
func parseMetrics(text string) (m Metrics, err error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("parse metrics: %w", err)
	}
	for _, name := range slices.Sorted(maps.Keys(families)) {
		m = m.add(families[name])
	}
	return m, nil
}

// get returns the body of a URL that answers with status 200. It leaves no connection open.
func get(ctx context.Context, url string) (body string, err error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return "", err
	}
	res, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, res.Body.Close()) }()
	if res.StatusCode != http.StatusOK {
		return "", fmt.Errorf("get %s: %s", url, res.Status)
	}
	text, err := io.ReadAll(res.Body)
	return string(text), err
}

func (m Metrics) add(f *dto.MetricFamily) Metrics {
	for _, metric := range f.GetMetric() {
		s := Sample{Name: f.GetName(), Labels: make(map[string]string)}
		for _, l := range metric.GetLabel() {
			s.Labels[l.GetName()] = l.GetValue()
		}
		// A metric has one of these types. The getters of the others return 0.
		s.Value = metric.GetCounter().GetValue() + metric.GetGauge().GetValue() + metric.GetUntyped().GetValue() +
			float64(metric.GetHistogram().GetSampleCount()+metric.GetSummary().GetSampleCount())
		m = append(m, s)
	}
	return m
}

// Select returns the samples of a metric whose labels have the given values; want alternates names
// and values. An empty name selects every metric.
func (m Metrics) Select(name string, want ...string) (selected Metrics) {
	for _, s := range m {
		matches := name == "" || s.Name == name
		for i := 0; i < len(want); i += 2 {
			matches = matches && s.Labels[want[i]] == want[i+1]
		}
		if matches {
			selected = append(selected, s)
		}
	}
	return selected
}

// Sum returns the sum of the samples that Select returns, or 0 if there are none.
func (m Metrics) Sum(name string, want ...string) (sum float64) {
	for _, s := range m.Select(name, want...) {
		sum += s.Value
	}
	return sum
}

// Value returns the one sample that Select returns; it fails the test unless there is exactly one.
func (m Metrics) Value(t Fataler, name string, want ...string) float64 {
	t.Helper()
	selected := m.Select(name, want...)
	if len(selected) != 1 {
		t.Fatal(fmt.Sprintf("metric %s %q has %d samples, want 1", name, want, len(selected)))
	}
	return selected[0].Value
}

// By returns the sums of the nonzero samples of a metric by the values of a label; nil if there are none.
func (m Metrics) By(name, label string) (sums map[string]float64) {
	for _, s := range m.Select(name) {
		if s.Value == 0 {
			continue
		}
		if sums == nil {
			sums = make(map[string]float64)
		}
		sums[s.Labels[label]] += s.Value
	}
	return sums
}
