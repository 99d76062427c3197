package main_test

import (
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/charmbracelet/x/ansi"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

func TestTopPrintsOnceWithoutATerminal(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	s := serverWithGap(t)
	f := follow(t, s)
	f.until("w", "stored [9]")
	got := kvcast(t, nil, "top", "--addr", s.Address(), "--interval", "100ms")
	for _, want := range []string{s.Address(), "1 worker (1 live) · 4 blocks · 1 subscriber\n", "WORKER  MODEL", "1 (1 batches) INCOMPLETE", "SUBSCRIBER", "follower"} {
		if !strings.Contains(got.out, want) || got.status != 0 || got.err != "" {
			t.Errorf("got status %d, %q and\n%s\nwant %q in it", got.status, got.err, got.out, want)
		}
	}
	if got := kvcast(t, nil, "top", "--interval", "1h"); got.status != 2 || !strings.Contains(got.err, "--interval: 1h0m0s is not allowed: want 100ms to 1m") {
		t.Errorf("got status %d and %q", got.status, got.err)
	}
}

func TestColoursOnTerminalsOnly(t *testing.T) {
	testclass.Process(t)
	s := serverWithGap(t)
	run := func() string { return kvcast(t, nil, "replay", "--addr", s.Address()).out }
	plain := run()
	if ansi.Strip(plain) != plain {
		t.Errorf("no terminal: got %q", plain)
	}
	t.Setenv("CLICOLOR_FORCE", "1")
	styled := run()
	if styled == plain || ansi.Strip(styled) != plain {
		t.Errorf("forced: got %q, want %q in colours", styled, plain)
	}
	for line := range strings.Lines(styled) {
		if strings.Contains(line, "GAP") && !strings.Contains(line, "31m") {
			t.Errorf("a gap is not red: %q", line)
		}
	}
}

func TestCompletion(t *testing.T) {
	testclass.Process(t)
	for line, want := range map[string]string{
		"kvcast sub":                              "subscribe",
		"kvcast subscribe --tier h":               "host_pinned",
		"kvcast subscribe --from ":                "earliest latest snapshot",
		"kvcast workers --mo":                     "--model",
		"kvcast simulate --policy p":              "prefix",
		"kvcast serve --config testdata/w":        "",
		"kvcast serve --config testdata/c":        "testdata/captures/",
		"kvcast completion z":                     "zsh",
		`kvcast workers --model 'a b' --o`:        "--output",
		`kvcast serve --config test\data/"c`:      "testdata/captures/",
		"kvcast subscribe --tier=d":               "--tier=device --tier=disk",
		"kvcast match --tokens-file=testdata/c":   "--tokens-file=testdata/captures/",
		"kvcast -":                                "--help",
		"kvcast subscribe --from latest --tier d": "device disk",
		"kvcast unknown --x ":                     "",
		"kvcast workers --model m --o":            "--output",
	} {
		t.Setenv("COMP_LINE", line)
		got := kvcast(t, nil)
		if strings.Join(slices.Sorted(strings.FieldsSeq(got.out)), " ") != want || got.status != 0 || got.err != "" {
			t.Errorf("%q: got status %d, %q and %q, want %q", line, got.status, got.err, got.out, want)
		}
	}
}

// TestCompletionAtCursor gives what bash does: the position of the cursor, and the part of the word that it replaces. Files are left to it.
func TestCompletionAtCursor(t *testing.T) {
	testclass.Process(t)
	for _, c := range []struct{ line, point, part, want string }{
		{"kvcast sub --tier", "10", "sub", "subscribe"},
		{"kvcast subscribe --tier=d", "25", "d", "device disk"},
		{"kvcast subscribe --tier=", "24", "", "device disk external host_pinned"},
		{"kvcast serve --config testdata/c", "32", "testdata/c", ""},
	} {
		t.Setenv("COMP_LINE", c.line)
		t.Setenv("COMP_POINT", c.point)
		got := kvcast(t, nil, "kvcast", c.part, "before")
		if strings.Join(slices.Sorted(strings.FieldsSeq(got.out)), " ") != c.want || got.status != 0 || got.err != "" {
			t.Errorf("%q: got status %d, %q and %q, want %q", c.line, got.status, got.err, got.out, c.want)
		}
	}
}

// TestCompletionInBash loads the script in a real shell.
func TestCompletionInBash(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("there is no bash here")
	}
	script := kvcast(t, nil, "completion", "bash")
	cmd := exec.CommandContext(t.Context(), bash, "-c", script.out+`complete -p kvcast && COMP_LINE='kvcast stat' eval "$(complete -p kvcast | sed "s/^complete -o default -C '\(.*\)' kvcast$/\1/; s/'\\\\''/'/g")"`)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.HasSuffix(string(out), "\nstatus\n") || !strings.Contains(string(out), filepath.Base(program(t))) {
		t.Errorf("%v: got %q after\n%s", err, out, script.out)
	}
	for _, shell := range []string{"zsh", "fish"} {
		if got := kvcast(t, nil, "completion", shell); got.status != 0 || !strings.Contains(got.out, program(t)) {
			t.Errorf("%s: got status %d and %q", shell, got.status, got.out)
		}
	}
	if got := kvcast(t, nil, "completion", "csh"); got.status != 2 || !strings.Contains(got.err, `must be one of "bash","zsh","fish"`) {
		t.Errorf("got status %d and %q", got.status, got.err)
	}
}

func TestHelpHasExamples(t *testing.T) {
	for _, command := range []string{"serve", "subscribe", "replay", "snapshot", "workers", "status", "top", "simulate", "decode", "demo", "version", "completion", "man"} {
		t.Run(command, func(t *testing.T) {
			t.Parallel()
			got := kvcast(t, nil, command, "--help")
			if got.status != 0 || !strings.Contains(got.out, "\n    kvcast "+command) && !strings.Contains(got.out, "source <(kvcast completion") {
				t.Errorf("got status %d and\n%s", got.status, got.out)
			}
		})
	}
}
