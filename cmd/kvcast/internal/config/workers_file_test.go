package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/feed"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
)

func TestReadWorkers(t *testing.T) {
	t.Parallel()
	worker := func(name string) ingestconfig.Worker {
		return ingestconfig.Worker{Name: name, Model: "m", Sources: []ingestconfig.Source{{Engine: feed.EngineVLLM, Connect: "tcp://" + name + ":1", DPSize: 1, Copies: ingestconfig.CopiesAuto, Clears: ingestconfig.ClearsAuto}}, Consolidate: feed.ConsolidateDedup}
	}
	labeled := worker("a")
	labeled.Labels = map[string]string{"zone": "x"}
	const a, b = "{name: a, model: m, sources: [{connect: \"tcp://a:1\"}]}", "{name: b, model: m, sources: [{connect: \"tcp://b:1\"}]}"
	file := filepath.Join(t.TempDir(), "w.yaml")
	for _, tt := range []struct {
		text string
		want []ingestconfig.Worker
		says string // where it is wrong
	}{
		{"- " + a + "\n- " + b, []ingestconfig.Worker{worker("a"), worker("b")}, ""},
		{"workers:\n- " + a, []ingestconfig.Worker{worker("a")}, ""},
		{"- {name: a, model: m, labels: {zone: x}, sources: [{connect: \"tcp://a:1\"}]}", []ingestconfig.Worker{labeled}, ""},
		{"- name: a\n  labels: {zone: x}\n  sources: [{connect: \"tcp://h:1\"}]\n- name: b\n  sources: [{connect: \"tcp://h:1\"}]\n  labels:\n    zone: x\n    rack: \"\\t\"",
			nil, file + `:8: workers[1].labels["rack"]: "\t" is not allowed: want `},
		{"[]", nil, ""},
		{"workers: []", nil, ""},
		{"", nil, file + ": names no workers: want a list"},
		{"# none\n", nil, file + ": names no workers: want a list"},
		{"workers:\n", nil, file + ": names no workers: want a list"},
		{"{}", nil, file + ": names no workers: want a list"},
		{"workers: {}", nil, file + ":1: workers: a mapping is not allowed: want a list"},
		{"a", nil, file + `:1: "a" is not allowed: want a mapping with workers`},
		{"worker: []", nil, file + `:1: unknown key "worker", did you mean workers? want workers`},
		{"- " + a + "\n- " + a, nil, file + `:2: workers[1].name: "a" is not allowed: want unique`},
		{"- " + a + "\n- {name: b, sources: [{connect: \"tcp://A:1\"}]}", nil, file + `:2: workers[1].sources[0].connect: "tcp://A:1" is not allowed: want a socket of its own: worker "b" would read`},
		{"- name: a\n  sources:\n  - conect: tcp://h:1", nil, file + `:3: workers[0].sources[0]: unknown key "conect", did you mean connect?`},
		{"- " + a + "\n- " + b + "\n- {name: c, sources: [{connect: \"tcp://h:1\"}]}", nil, file + ":1: workers: 3 is not allowed: want "},
		{"- " + a + "\n- {name: ", nil, file + ": yaml: line 2: "},
	} {
		if err := os.WriteFile(file, []byte(tt.text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := ReadWorkers(file, 2)
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", tt.text, diff)
		}
		if (err == nil) != (tt.says == "") || err != nil && !strings.HasPrefix(err.Error(), tt.says) {
			t.Errorf("%q: got error %v, want %q", tt.text, err, tt.says)
		}
	}
	if _, err := ReadWorkers(file+"x", 2); err == nil {
		t.Error("a missing file: want an error")
	}
}
