package observe_test

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.uber.org/goleak"

	"github.com/kvcast/kvcast/test/harness"
)

// parallel is the number of tests that run at a time, unless flag -parallel is set: most of their time, they wait for scrapes.
const parallel = "4"

func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", parallel); err != nil { // a flag of the command line overrides it
		panic(err)
	}
	// nats-server can leave these behind when it stops.
	const natsServer = "github.com/nats-io/nats-server/v2/server"
	os.Exit(harness.RunTests(m, goleak.IgnoreTopFunction(natsServer+".(*msgBlock).flushLoop"),
		goleak.IgnoreTopFunction(natsServer+".(*fileStore).flushStreamStateLoop"), goleak.IgnoreTopFunction(natsServer+"/ats.Register.func1")))
}

// documented is a row of docs/metrics.md.
type documented struct {
	name, kind, unit string
	labels           []string // sorted
	served           []string // conditions; none for always
}

// isServed reports whether a metric is there when some conditions hold.
func (d documented) isServed(conditions []string) bool {
	return !slices.ContainsFunc(d.served, func(c string) bool { return !slices.Contains(conditions, c) })
}

// conditions are the values of the column "served", beside always.
var conditions = []string{"worker", "event", "dedup", "discovery", "durable", "file", "nats", "egress", "smg", "tls"}

var (
	metricRow = regexp.MustCompile("^\\| `((?:kvcast|grpc)_[a-z_]+)` \\| (.*) \\|$")
	quoted    = regexp.MustCompile("`([a-z_]+)`")
)

// documentedMetrics returns the rows by name.
func documentedMetrics(t *testing.T) map[string]documented {
	t.Helper()
	text, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]documented)
	for line := range strings.Lines(string(text)) {
		m := metricRow.FindStringSubmatch(strings.TrimSpace(line))
		if m == nil {
			continue
		}
		columns := strings.Split(strings.ReplaceAll(m[2], "| |", "|  |"), " | ") // an empty column has one space
		d := documented{name: m[1]}
		if _, twice := all[d.name]; twice || len(columns) != 5 {
			t.Fatalf("%s has %d columns after the name, or stands there twice: %q", d.name, len(columns), line)
		}
		d.kind, d.unit = columns[0], columns[2]
		for _, q := range quoted.FindAllStringSubmatch(columns[1], -1) {
			d.labels = append(d.labels, q[1])
		}
		slices.Sort(d.labels)
		if served := columns[3]; served != "always" {
			d.served = strings.Split(served, ", ")
		}
		for _, c := range d.served {
			if !slices.Contains(conditions, c) {
				t.Errorf("%s: served %q is not explained", d.name, c)
			}
		}
		all[d.name] = d
	}
	return all
}

// check compares a served metric with its documentation.
func (d documented) check(f *dto.MetricFamily) error {
	if got := strings.ToLower(f.GetType().String()); got != d.kind {
		return fmt.Errorf("its type is %s, documented as %s", got, d.kind)
	}
	name := strings.TrimSuffix(d.name, "_total")
	for _, unit := range []string{"seconds", "bytes"} {
		if isUnit := strings.HasSuffix(name, "_"+unit) || strings.Contains(name, "_"+unit+"_"); isUnit != (d.unit == unit) {
			return fmt.Errorf("its unit is documented as %s", d.unit)
		}
	}
	for _, m := range f.GetMetric() {
		var labels []string
		for _, l := range m.GetLabel() {
			labels = append(labels, l.GetName())
		}
		if slices.Sort(labels); !slices.Equal(labels, d.labels) {
			return fmt.Errorf("its labels are %q, documented as %q", labels, d.labels)
		}
	}
	return nil
}

// families returns the metrics of a server by name, without those of the Go runtime and the process, and the text.
func families(ctx context.Context, p *harness.Process) (map[string]*dto.MetricFamily, string, error) {
	text, err := p.Get(ctx, "/metrics")
	if err != nil {
		return nil, "", err
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	all, err := parser.TextToMetricFamilies(strings.NewReader(text))
	maps.DeleteFunc(all, func(name string, _ *dto.MetricFamily) bool {
		return strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_")
	})
	return all, text, err
}

// disagreements compares the metrics of a server with the documentation, given the conditions that hold. If the server is
// idle, metrics whose conditions do not hold must be missing.
func disagreements(rows map[string]documented, served map[string]*dto.MetricFamily, conditions []string, isIdle bool) (all []string) {
	for name, f := range served {
		row, ok := rows[name]
		switch {
		case !ok:
			all = append(all, name+": is not documented")
		case isIdle && !row.isServed(conditions):
			all = append(all, fmt.Sprintf("%s: is documented as served if %q", name, row.served))
		default:
			if err := row.check(f); err != nil {
				all = append(all, fmt.Sprintf("%s: %v", name, err))
			}
		}
	}
	for name, row := range rows {
		if served[name] == nil && row.isServed(conditions) {
			all = append(all, fmt.Sprintf("%s: is not served, documented as served if %q", name, row.served))
		}
	}
	slices.Sort(all)
	return all
}
