package config

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
)

// TestDiscoveredFileIsRelativeToTheConfigurationFile also checks that links to the configuration file, as volumes of Kubernetes
// have them, are not followed, and that a pipe has no directory of its own.
func TestDiscoveredFileIsRelativeToTheConfigurationFile(t *testing.T) {
	dir, elsewhere := t.TempDir(), t.TempDir()
	write := func(file, text string) string {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	read := func(file string) []string {
		t.Helper()
		c, _, err := Read(Sources{File: file})
		if err != nil {
			t.Fatal(err)
		}
		var files []string
		for _, d := range c.Discovery {
			files = append(files, d.File)
		}
		return files
	}
	const text = "discovery: [{file: w.yaml}, {file: ../w.yaml}, {file: /w.yaml}, {dns: h, port: 1}]"
	in := func(dir string) []string {
		return []string{filepath.Join(dir, "w.yaml"), filepath.Join(filepath.Dir(dir), "w.yaml"), "/w.yaml", ""}
	}
	file := write(filepath.Join(dir, "kvcast.yaml"), text)
	if diff := cmp.Diff(in(dir), read(file)); diff != "" {
		t.Errorf("an absolute name (-want +got):\n%s", diff)
	}
	link := filepath.Join(elsewhere, "kvcast.yaml")
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(in(elsewhere), read(link)); diff != "" {
		t.Errorf("a link (-want +got):\n%s", diff)
	}
	t.Chdir(elsewhere)
	relative, err := filepath.Rel(elsewhere, file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(in(dir), read(relative)); diff != "" {
		t.Errorf("a relative name (-want +got):\n%s", diff)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteString(text); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }() // nothing is written
	if diff := cmp.Diff(in(elsewhere), read(fmt.Sprintf("/dev/fd/%d", r.Fd()))); diff != "" {
		t.Errorf("a pipe (-want +got):\n%s", diff)
	}
}

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

// TestFilesOfWorkersAreBounded reads files that are endless, or have many mistakes. The error is a short line.
func TestFilesOfWorkersAreBounded(t *testing.T) {
	t.Parallel()
	var keys strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&keys, "kkkkk%d: v, ", i)
	}
	file := filepath.Join(t.TempDir(), "w.yaml")
	for _, tt := range []struct{ name, text, says string }{
		{"large", strings.Repeat("#", 1<<20) + "\n[]", file + " has more than 1024 KiB: want at most 1024 KiB for 2 workers, which ingest.max_workers allows"},
		{"many workers", strings.Repeat("- {}\n", 20_000), file + ":1: workers: 20000 is not allowed: want at most 2"},
		{"many sources", "- name: a\n  sources: [" + strings.Repeat("{},", 20_000) + "]", file + ":2: workers[0].sources: 20000 is not allowed: want at most 128"},
		{"many mistakes", "- {" + keys.String() + "}", "; and 992 more"},
		{"a long mistake", "- {name: \"" + strings.Repeat("x", 900_000) + "\"}", "xxx..."},
	} {
		if err := os.WriteFile(file, []byte(tt.text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := ReadWorkers(file, 2)
		if err == nil || !strings.Contains(err.Error(), tt.says) || len(err.Error()) > maxLoggedMistakes*(maxMessage+10) {
			t.Errorf("%s: got %.300q, want %q", tt.name, err, tt.says)
		}
	}
	if _, err := ReadWorkers("/dev/zero", 2); err == nil {
		t.Error("an endless file: want an error")
	}
}
