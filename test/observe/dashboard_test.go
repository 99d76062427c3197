package observe_test

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// dashboard is the part of Grafana's JSON model that the tests need.
type dashboard struct {
	UID        string
	Panels     []panel
	Templating struct{ List []variable }
}

type panel struct {
	ID          int
	Type, Title string
	Datasource  struct{ Type, UID string }
	FieldConfig struct{ Defaults struct{ Unit string } }
	GridPos     struct{ X, Y, W, H int }
	Targets     []target
}

type target struct {
	RefID      string
	Expr       string
	Datasource struct{ Type, UID string }
}

type variable struct {
	Name, Type, Definition string
}

func readDashboard(t *testing.T) (d dashboard) {
	t.Helper()
	text, err := os.ReadFile("../../deploy/helm/kvcast/files/kvcast.json")
	if err == nil {
		err = json.Unmarshal(text, &d)
	}
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// units are Grafana's units that the dashboard uses.
var units = []string{"none", "ops", "s", "bytes", "Bps", "percentunit"}

func TestDashboardIsConsistent(t *testing.T) {
	d, rows := readDashboard(t), documentedMetrics(t)
	var names []string
	for _, v := range d.Templating.List {
		names = append(names, v.Name)
	}
	ids, taken, rowTitles := make(map[int]bool), make(map[[2]int]string), []string(nil)
	for _, p := range d.Panels {
		if ids[p.ID] {
			t.Errorf("%s: id %d is not unique", p.Title, p.ID)
		}
		ids[p.ID] = true
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				at := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
				if other := taken[at]; other != "" || at[0] >= 24 {
					t.Errorf("%s and %s overlap, or are too wide", p.Title, other)
				}
				taken[at] = p.Title
			}
		}
		if p.Type == "row" {
			rowTitles = append(rowTitles, p.Title)
			continue
		}
		if p.Datasource.UID != "${datasource}" || !slices.Contains(units, p.FieldConfig.Defaults.Unit) || len(p.Targets) == 0 {
			t.Errorf("%s: has data source %q, unit %q and %d queries", p.Title, p.Datasource.UID, p.FieldConfig.Defaults.Unit, len(p.Targets))
		}
		refs := make(map[string]bool)
		for _, q := range p.Targets {
			if refs[q.RefID] || q.Datasource.UID != "${datasource}" {
				t.Errorf("%s: query %s is not unique, or has data source %q", p.Title, q.RefID, q.Datasource.UID)
			}
			refs[q.RefID] = true
			checkMetrics(t, rows, q.Expr)
			for _, m := range regexp.MustCompile(`\$\{?(\w+)`).FindAllStringSubmatch(q.Expr, -1) {
				if m[1] != "__rate_interval" && !slices.Contains(names, m[1]) {
					t.Errorf("%s: variable %s is not defined", p.Title, m[0])
				}
			}
		}
	}
	if want := []string{"Fleet", "Ingest health", "Stream", "Index and match", "Journal and cluster"}; !slices.Equal(rowTitles, want) {
		t.Errorf("got rows %q, want %q", rowTitles, want)
	}
	if len(names) == 0 || names[0] != "datasource" || d.Templating.List[0].Type != "datasource" {
		t.Errorf("got variables %q, want datasource first", names)
	}
}

// resolve replaces the variables of a query as Grafana does, with all workers and servers selected.
func resolve(query, job, rateInterval string) string {
	return strings.NewReplacer("$__rate_interval", rateInterval, "$job", job, "$instance", ".*", "$worker", ".*").Replace(query)
}
