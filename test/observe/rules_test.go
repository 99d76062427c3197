package observe_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

const rulesDir = "../../deploy/helm/kvcast/files"

// needs skips a test unless a program of Prometheus is installed, and returns its path.
func needs(t *testing.T, program string) string {
	t.Helper()
	if path, err := exec.LookPath(program); err == nil {
		return path
	}
	path, err := filepath.Abs("../../bin/prometheus/usr/bin/" + program)
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		t.Skipf("%s is not installed: run make observe", program)
	}
	return path
}

func TestAlertRulesPassTheirTests(t *testing.T) {
	testclass.Process(t)
	promtool := needs(t, "promtool")
	for _, args := range [][]string{{"check", "rules", "kvcast.rules.yaml"}, {"test", "rules", "kvcast.rules.test.yaml"}} {
		cmd := exec.CommandContext(t.Context(), promtool, args...)
		cmd.Dir = rulesDir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %v: %v\n%s", args, err, out)
		}
	}
}

func readYAML(t *testing.T, path string, to any) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err == nil {
		err = yaml.Unmarshal(text, to)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// metricNames finds metrics in queries.
var metricNames = regexp.MustCompile(`\b(?:kvcast|grpc)_[a-z_]+`)

// checkMetrics reports metrics of a query that are not documented.
func checkMetrics(t *testing.T, rows map[string]documented, query string) {
	t.Helper()
	for _, name := range metricNames.FindAllString(query, -1) {
		if _, ok := rows[regexp.MustCompile(`_(bucket|count|sum)$`).ReplaceAllString(name, "")]; !ok && name != "grpc_method" && name != "grpc_code" {
			t.Errorf("%s is not in docs/metrics.md: %s", name, query)
		}
	}
}

// TestEveryAlertHasARunbookAndTests checks that each alert has a section in the runbooks, and tests in which it fires and does
// not, and that no section is left over.
func TestEveryAlertHasARunbookAndTests(t *testing.T) {
	var rules struct {
		Groups []struct {
			Rules []struct {
				Alert, Expr         string
				Labels, Annotations map[string]string
			}
		}
	}
	var tests struct {
		Tests []struct {
			AlertRuleTest []struct {
				Alertname string
				ExpAlerts []any `yaml:"exp_alerts"`
			} `yaml:"alert_rule_test"`
		}
	}
	readYAML(t, rulesDir+"/kvcast.rules.yaml", &rules)
	readYAML(t, rulesDir+"/kvcast.rules.test.yaml", &tests)
	fires, quiet := make(map[string]bool), make(map[string]bool)
	for _, test := range tests.Tests {
		for _, a := range test.AlertRuleTest {
			if len(a.ExpAlerts) > 0 {
				fires[a.Alertname] = true
			} else {
				quiet[a.Alertname] = true
			}
		}
	}
	runbooks, err := os.ReadFile("../../docs/runbooks.md")
	if err != nil {
		t.Fatal(err)
	}
	var sections, alerts []string
	for _, m := range regexp.MustCompile(`(?m)^## (\S+)$`).FindAllStringSubmatch(string(runbooks), -1) {
		sections = append(sections, m[1])
	}
	rows := documentedMetrics(t)
	for _, r := range rules.Groups[0].Rules {
		alerts = append(alerts, r.Alert)
		checkMetrics(t, rows, r.Expr)
		if !fires[r.Alert] || !quiet[r.Alert] {
			t.Errorf("%s: tested as firing: %t, as not firing: %t; want both", r.Alert, fires[r.Alert], quiet[r.Alert])
		}
		if want := "https://github.com/kvcast/kvcast/blob/main/docs/runbooks.md#" + strings.ToLower(r.Alert); r.Annotations["runbook_url"] != want {
			t.Errorf("%s: runbook_url is %q, want %q", r.Alert, r.Annotations["runbook_url"], want)
		}
		if !slices.Contains([]string{"critical", "warning", "info"}, r.Labels["severity"]) || r.Annotations["summary"] == "" {
			t.Errorf("%s has labels %v and annotations %v, want a severity and a summary", r.Alert, r.Labels, r.Annotations)
		}
	}
	if !slices.Equal(sections, alerts) {
		t.Errorf("the runbooks have sections\n%q, want those of the alerts\n%q", sections, alerts)
	}
}
