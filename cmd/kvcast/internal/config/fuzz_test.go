package config

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
)

// addFiles adds files with and without mistakes to a corpus.
func addFiles(f *testing.F, more ...string) {
	for _, name := range []string{"whole.yaml", "mistakes.yaml"} {
		text, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	for _, text := range more {
		f.Add([]byte(text))
	}
}

// wantPlace fails the test unless a message is a line that begins with the place of the mistake.
func wantPlace(t *testing.T, message, file string) {
	t.Helper()
	if strings.ContainsFunc(message, unicode.IsControl) || !strings.HasPrefix(message, file+":") {
		t.Errorf("a message that is not one line that begins with %s: %q", file, message)
	}
}

// aliased is a file of workers in which aliases have n² sources.
func aliased(n int) string {
	source, worker := strings.Repeat(", *s", n-1), strings.Repeat("\n- *w", n-1)
	return "- &w {name: a, sources: [&s {connect: \"tcp://h:1\"}" + source + "]}" + worker
}

// TestAliasesAreBounded has files of a few kilobytes that would take gigabytes.
func TestAliasesAreBounded(t *testing.T) {
	file := filepath.Join(t.TempDir(), "w.yaml")
	for text, want := range map[string]string{
		aliased(3):                 file + ":1: workers[0].sources[1].connect: \"tcp://h:1\" is not allowed: want a socket of its own",
		aliased(3000):              file + ": aliases make it many times larger",
		"&a [*a]":                  file + ": aliases make it many times larger",
		"workers: &a [*a, *a, *a]": file + ": aliases make it many times larger",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadWorkers(file, 10); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%.100s: got error %.300v, want %s", text, err, want)
		}
	}
}

// FuzzFile reads configuration files. One that is accepted is valid, and the same after it is written and read again. Otherwise
// each mistake is a line with its place.
func FuzzFile(f *testing.F) {
	addFiles(f, "", "listen: :1\n---\nadmin: :2", "listen: *a", "workers: &a [*a]\nlisteners: *a\n<<: *a", "a: &a [&b [*a, *b]]",
		"\xff", "? [a]\n: b",
		"workers: [{name: a, http: \"http://h:1\"}]", labeled("{zone: a, \"\": b, zone: c}"),
		labeled("\n    Model.x[0]: \"a\\tb\"\n"), "ingest: {silence: 0s, grace: 1h}",
		"journal: {store: \"nats://a:4222,tls://b\", stream: s, replicas: 3}", "egress: {zmq: {bind: \"tcp://*:1\"}}",
		"\"li\\nsten\": \":1\"")
	f.Fuzz(func(t *testing.T, text []byte) {
		r := newReader()
		r.file("f", text)
		c, from, err := r.finish()
		if err != nil {
			messages := []string{err.Error()}
			if head, rest, several := strings.Cut(messages[0], " mistakes:\n  "); several {
				messages = strings.Split(rest, "\n  ")
				if head != "read configuration: "+strconv.Itoa(len(messages)) {
					t.Errorf("%q, with %d messages", head, len(messages))
				}
			}
			for _, message := range messages {
				wantPlace(t, message, "f")
			}
			return
		}
		if err := c.Ingest.Validate(); err != nil {
			t.Error(err)
		}
		var written bytes.Buffer
		if err := c.Write(&written, from); err != nil {
			t.Fatal(err)
		}
		again, _, err := readText(written.String())
		if err != nil {
			t.Fatalf("%v in:\n%s", err, written.String())
		}
		if diff := compare(c, again); diff != "" {
			t.Errorf("(-want +got):\n%s\nof:\n%s", diff, written.String())
		}
	})
}

// FuzzWorkersFile reads files of workers. The workers of one that is accepted are valid, no more than allowed, and the same after
// they are written, with or without the key workers. Otherwise the error is a line that names the file.
func FuzzWorkersFile(f *testing.F) {
	const a, b = "{name: a, model: m, sources: [{connect: \"tcp://h:1\"}]}", "{name: b, http: \"http://h:1\", labels: {zone: x}}"
	addFiles(f, "- "+a+"\n- "+b, "workers:\n- "+a, "[]", "workers: []", "", "# none\n", "workers:\n", "{}", "workers: {}", "a",
		"worker: []", "- "+a+"\n- "+a,
		"- "+a+"\n- "+b+"\n- {name: c}", "- "+a+"\n- {name: ", "- &a "+a+"\n- *a\n", "&a [*a]", aliased(3), aliased(200),
		"[]\n---\n[]", "- {name: \"a\\nb\", \"c\\nd\": 1, labels: {\"\\t\": 1}}",
		"- name: a\n  sources: [{engine: trtllm, connect: \"ipc:///tmp/x\", dp_size: 2, topic: t, copies: counted}, "+
			"{connect: \"smg://h:2\"}]\n  consolidate: passthrough")
	const most = 3
	file, err := os.Create(filepath.Join(f.TempDir(), "w.yaml"))
	if err != nil {
		f.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	read := func(t *testing.T, text []byte) ([]ingestconfig.Worker, error) {
		t.Helper()
		_, err := file.WriteAt(text, 0)
		if err := errors.Join(err, file.Truncate(int64(len(text)))); err != nil { // faster than a new file
			t.Fatal(err)
		}
		return ReadWorkers(file.Name(), most)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		workers, err := read(t, text)
		if err != nil {
			wantPlace(t, err.Error(), file.Name())
			if workers != nil {
				t.Errorf("%d workers and an error", len(workers))
			}
			return
		}
		if err := (ingestconfig.Config{Workers: workers}).Validate(); err != nil || len(workers) > most {
			t.Errorf("%d workers, at most %d are allowed: %v", len(workers), most, err)
		}
		list := listOf(&workers, workerFields).write(nil, "workers")
		for _, n := range []*yaml.Node{list, {Kind: yaml.MappingNode, Content: []*yaml.Node{stringNode("workers"), list}}} {
			written, err := yaml.Marshal(n)
			if err != nil {
				t.Fatal(err)
			}
			again, err := read(t, written)
			if diff := cmp.Diff(workers, again); err != nil || diff != "" {
				t.Errorf("error %v (-want +got):\n%s\nof:\n%s", err, diff, written)
			}
		}
	})
}
