package conformance_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/test/conformance"
	"github.com/kvcast/kvcast/test/conformance/gorunner"
)

// load returns all scripts.
func load(t *testing.T) []*conformance.Script {
	t.Helper()
	all, err := conformance.Load("scripts")
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// pass plays all scripts for a client.
func pass(t *testing.T, r *conformance.Runner) {
	t.Helper()
	var ended error
	for _, s := range load(t) {
		t.Run(s.Name, func(t *testing.T) {
			if ended != nil {
				t.Fatalf("%s: not played: %v", s.About, ended)
			}
			var wrong []string
			wrong, ended = r.Play(t, s)
			if len(wrong) > 0 {
				t.Errorf("%s", s.About)
			}
			for _, w := range wrong {
				t.Error(w)
			}
			if ended != nil {
				t.Fatal(ended)
			}
		})
	}
}

func TestGo(t *testing.T) {
	t.Parallel()
	jobsIn, jobs := io.Pipe()
	lines, linesOut := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := gorunner.Run(t.Context(), jobsIn, linesOut)
		_ = linesOut.CloseWithError(err) // it returns nil always
		ended <- err
	}()
	pass(t, conformance.NewRunner(jobs, lines))
	_ = jobs.Close() // it returns nil always
	if err := <-ended; err != nil && !errors.Is(err, io.ErrClosedPipe) {
		t.Error(err)
	}
}

// TestVectorsOfDocs compares the tokens hashes in docs/resuming.md with those of the client.
func TestVectorsOfDocs(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/resuming.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, lora := range []string{"", "ada"} {
		for _, hash := range client.TokensHashes([]uint32{1, 2, 3, 4, 5, 6, 7, 8, 9}, 4, lora, "") {
			if want := fmt.Sprintf("`%016x`", hash); !strings.Contains(string(text), want) {
				t.Errorf("docs/resuming.md: the tokens hash %s, with adapter %q, is missing", want, lora)
			}
		}
	}
}

// TestScriptsAreChecked checks that a script with a mistake is refused.
func TestScriptsAreChecked(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"about is missing":                `{"calls": [{}], "want": [{}]}`,
		"calls are missing":               `{"about": "a", "want": [{}]}`,
		"want is missing":                 `{"about": "a", "calls": [{}]}`,
		`unknown field "stream"`:          `{"about": "a", "calls": [{}], "want": [{}], "stream": []}`,
		"streams[0].send[0]":              `{"about": "a", "calls": [{}], "want": [{}], "streams": [{"send": [{"entry": {}}]}]}`,
		"streams[0].expect":               `{"about": "a", "calls": [{}], "want": [{}], "streams": [{"expect": 1}]}`,
		`method "Subscribe" is not`:       `{"about": "a", "calls": [{}], "want": [{}], "answers": [{"method": "Subscribe"}]}`,
		"match_streams[0].answers[0].exp": `{"about": "a", "calls": [{}], "want": [{}], "match_streams": [{"answers": [{"expect": {"x": 1}}]}]}`,
	} {
		folder := t.TempDir()
		if err := os.WriteFile(filepath.Join(folder, "s.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := conformance.Load(folder); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: got error %v", name, err)
		}
	}
}

// TestWrongClientsFail plays scripts for a client that reports other lines, makes other calls, or ends.
func TestWrongClientsFail(t *testing.T) {
	t.Parallel()
	script := load(t)[0]
	for name, lines := range map[string]string{
		"reports nothing": "{\"end\": true}\n", "reports another line": "{\"update\": \"entries\"}\n{\"end\": true}\n", "reports no JSON": "x\n", "ends": "",
	} {
		r := conformance.NewRunner(io.Discard, strings.NewReader(lines))
		wrong, err := r.Play(t, script)
		r.Drain()
		if len(wrong) == 0 {
			t.Errorf("a client that %s passes: %v", name, err)
		}
	}
}
