package observe_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/test/harness"
)

// incident is what makes an alert fire.
type incident struct {
	// test is the test that makes it happen and sees the alert; empty: none does, for the reason in what.
	test string
	what string
}

// incidents has an incident for each alert.
var incidents = map[string]incident{
	"KvcastDown":                 {"TestIncidentsOfServers", "a server is killed; TestIncidentsOfDisks: it ends at once in each run, because the disk is full"},
	"KvcastRestarts":             {"TestIncidentsOfServers", "a server is killed as often as it is started"},
	"KvcastNotReady":             {"TestIncidentsOfServers", "a server starts without the file of its discovery"},
	"KvcastDiskFills":            {"TestIncidentsOfDisks", "a file fills the disk of the journal"},
	"KvcastCallsUnauthenticated": {"TestIncidentsOfServers", "calls have no token"},
	"KvcastCertificateExpires":   {"TestIncidentsOfServers", "a certificate is valid for an hour, and another one has expired"},
	"KvcastMemoryHigh":           {"TestIncidentsOfMemory", "the live data grows towards GOMEMLIMIT"},
	"KvcastLimitNear":            {"TestIncidentsOfServers", "an engine stores nine tenths of ingest.max_blocks, and more"},
	"KvcastLimitReached":         {"TestIncidentsOfServers", "an engine stores more than ingest.max_blocks"},
	"KvcastPanic":                {"", "no request is known that makes a call panic; server's own tests make a handler panic, and see the counter"},

	"KvcastBatchesLost":       {"TestIncidentsOfEngines", "a batch is neither sent nor replayed; TestIncidentsOfClusters: while its worker is taken over"},
	"KvcastRankIncomplete":    {"TestIncidentsOfEngines", "a batch is neither sent nor replayed"},
	"KvcastBlockSizeMismatch": {"TestIncidentsOfEngines", "an engine stores blocks of another size"},
	"KvcastEventsSkipped":     {"TestIncidentsOfEngines", "an event names a medium that kvcast does not know"},
	"KvcastRepairsFail":       {"TestIncidentsOfEngines", "a batch is lost, and the replay socket does not answer"},
	"KvcastRepairsContinue":   {"TestIncidentsOfEngines", "every second batch is lost, and replayed"},
	"KvcastEngineUnreachable": {"TestIncidentsOfEngines", "an engine's sockets are closed"},
	"KvcastEngineSilent":      {"TestIncidentsOfEngines", "the network drops all packets of open connections"},
	"KvcastBatchesRejected":   {"TestIncidentsOfEngines", "a peer of a listener sends what is no batch"},
	"KvcastEngineDelayHigh":   {"TestIncidentsOfEngines", "the clock of an engine is behind"},
	"KvcastEngineClockAhead":  {"TestIncidentsOfEngines", "the clock of an engine is ahead"},
	"KvcastDiscoveryFails":    {"TestIncidentsOfDiscovery", "the file of a discovery is no YAML any more"},
	"KvcastDiscoveryRejects":  {"TestIncidentsOfDiscovery", "a discovered worker has the name of a configured one"},
	"KvcastWorkersGone":       {"TestIncidentsOfDiscovery", "the file of a discovery becomes empty, and all engines of a listener go"},

	"KvcastSubscriberLags":       {"TestIncidentsOfRouters", "a subscriber stops to read"},
	"KvcastSubscribersAborted":   {"TestIncidentsOfRouters", "a subscriber reads nothing for subscribers.stall"},
	"KvcastEntriesEvictedUnread": {"TestIncidentsOfRouters", "a subscriber does not read while the journal evicts its entries"},
	"KvcastOverpredicted":        {"TestIncidentsOfRouters", "routers report that an engine reused less than was predicted"},

	"KvcastDelayHigh":   {"TestIncidentsOfOverload", "engines publish more than the server can process"},
	"KvcastIndexBehind": {"TestIncidentsOfOverload", "engines publish more than the server can process"},

	"KvcastJournalStalled":      {"TestAlertsFireInAnOutage", "the server does not reach NATS"},
	"KvcastStale":               {"TestAlertsFireInAnOutage", "the server does not reach NATS"},
	"KvcastJournalDisconnected": {"TestAlertsFireInAnOutage", "the server does not reach NATS"},
	"KvcastIsolated":            {"TestAlertsFireInAnOutage", "the server does not reach NATS"},

	"KvcastForeignMessages":  {"TestIncidentsOfClusters", "a program publishes to the subjects of the journal"},
	"KvcastCheckpointsFail":  {"TestIncidentsOfClusters", "the stream of the checkpoints is deleted"},
	"KvcastCutOff":           {"TestIncidentsOfClusters", "one of two servers reaches no engine"},
	"KvcastWorkersTakenOver": {"TestIncidentsOfClusters", "what a server sends to NATS arrives later than cluster.ttl"},
	"KvcastFenced":           {"TestIncidentsOfClusters", "what a server sends to NATS arrives when another server has its workers"},
	"KvcastTakeoverSlow":     {"TestIncidentsOfTakeovers", "the network between the server and NATS is slow, and the checkpoint large"},
}

// TestEveryAlertHasAnIncident checks that each alert has an incident, that its test names the alert, and that no incident is left over.
func TestEveryAlertHasAnIncident(t *testing.T) {
	var rules struct {
		Groups []struct{ Rules []struct{ Alert string } }
	}
	readYAML(t, rulesDir+"/kvcast.rules.yaml", &rules)
	named := alertsInTests(t)
	left := maps.Clone(incidents)
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			i, ok := left[r.Alert]
			delete(left, r.Alert)
			switch {
			case !ok || i.what == "":
				t.Errorf("%s has no incident", r.Alert)
			case i.test != "" && !named[i.test][r.Alert]:
				t.Errorf("%s: %s does not name it", r.Alert, i.test)
			}
		}
	}
	for alert := range left {
		t.Errorf("%s is no alert", alert)
	}
}

var alertName = regexp.MustCompile(`Kvcast\w+`)

// alertsInTests returns the alerts that the strings of each test of this package name.
func alertsInTests(t *testing.T) map[string]map[string]bool {
	t.Helper()
	files, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]map[string]bool)
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			test, ok := d.(*ast.FuncDecl)
			if !ok || !strings.HasPrefix(test.Name.Name, "Test") {
				continue
			}
			named := make(map[string]bool)
			all[test.Name.Name] = named
			ast.Inspect(test, func(n ast.Node) bool {
				if l, ok := n.(*ast.BasicLit); ok && l.Kind == token.STRING {
					for _, alert := range alertName.FindAllString(l.Value, -1) {
						named[alert] = true
					}
				}
				return true
			})
		}
	}
	return all
}

// alertFor is how long a condition must hold in the rules of shortRules: two evaluations find it.
const alertFor = "2s"

var forLine = regexp.MustCompile(`(?m)^( +for: )\w+$`)

// shortRules writes a copy of the alert rules in which each "for:" is alertFor, and returns its path. All else is as it is: the expressions
// with their ranges, offsets and thresholds. A range reaches back to the first scrape if that is later.
func shortRules(t *testing.T) string {
	t.Helper()
	rules, err := os.ReadFile(rulesDir + "/kvcast.rules.yaml")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "kvcast.rules.yaml")
	if err := os.WriteFile(file, forLine.ReplaceAll(rules, []byte("${1}"+alertFor)), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// alert is an alert with some of its labels, such as KvcastBatchesLost{worker="w"}.
type alert string

// of returns an alert. labels alternates names and values of labels.
func of(name string, labels ...string) alert {
	var matchers []string
	for i := 0; i < len(labels); i += 2 {
		matchers = append(matchers, labels[i]+"="+strconv.Quote(labels[i+1]))
	}
	return alert(name + "{" + strings.Join(matchers, ",") + "}")
}

// watch starts a Prometheus with shortRules that scrapes addresses, and waits until it has scraped each of them twice: from then on, increase()
// sees each increase of a counter that they serve.
func watch(t *testing.T, addresses ...string) *prometheus {
	t.Helper()
	p := startPrometheusWith(t, scrapeInterval, shortRules(t), addresses...)
	for _, a := range addresses {
		await(t, func() bool { return !p.isEmpty(fmt.Sprintf(`sum_over_time(up{instance=%q}[10m]) >= 2`, a)) })
	}
	return p
}

// fires reports whether an alert fires.
func (p *prometheus) fires(a alert) bool {
	p.t.Helper()
	name, labels, _ := strings.Cut(strings.TrimSuffix(string(a), "}"), "{")
	return !p.isEmpty(fmt.Sprintf(`ALERTS{alertstate="firing",alertname=%q,%s}`, name, labels))
}

// quiet fails the test if any alert fires.
func (p *prometheus) quiet(alerts ...alert) {
	p.t.Helper()
	for _, a := range alerts {
		if p.fires(a) {
			p.t.Errorf("%s fires before its incident", a)
		}
	}
}

// wantFiring waits until each alert has fired. It calls the function, unless it is nil, before each look.
func (p *prometheus) wantFiring(during func(), alerts ...alert) {
	p.t.Helper()
	left := slices.Clone(alerts)
	p.t.Cleanup(func() {
		if p.t.Failed() && len(left) > 0 {
			p.t.Logf("did not fire: %q", left)
		}
	})
	await(p.t, func() bool {
		if during != nil {
			during()
		}
		left = slices.DeleteFunc(left, p.fires)
		return len(left) == 0
	})
}

// instance returns the address of a server's metrics.
func instance(t *testing.T, p *harness.Process) string {
	t.Helper()
	return adminAddresses(t, p)[0]
}

// TestShortRulesDifferInTheirTimesOnly checks that no "for:" is left as it was, and nothing else is changed.
func TestShortRulesDifferInTheirTimesOnly(t *testing.T) {
	type rule struct {
		Alert, Expr, For string
	}
	type file struct {
		Groups []struct{ Rules []rule }
	}
	var rules, short file
	readYAML(t, rulesDir+"/kvcast.rules.yaml", &rules)
	readYAML(t, shortRules(t), &short)
	for i, r := range rules.Groups[0].Rules {
		if r.For != "" {
			r.For = alertFor
		}
		if got := short.Groups[0].Rules[i]; got != r {
			t.Errorf("got %+v, want %+v", got, r)
		}
	}
}
