package packaging_test

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// TestImageContextHasWhatKvcastIsBuiltFrom compares the folders that .dockerignore lets through with those that kvcast imports.
func TestImageContextHasWhatKvcastIsBuiltFrom(t *testing.T) {
	const module = "github.com/kvcast/kvcast/"
	text, err := os.ReadFile("../../.dockerignore")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(text), "\n")
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", module+"cmd/kvcast").Output()
	if err != nil {
		t.Fatal(err)
	}
	var folders []string
	for name := range strings.Lines(string(out)) {
		if in, ok := strings.CutPrefix(strings.TrimSpace(name), module); ok {
			folder, _, _ := strings.Cut(in, "/")
			folders = append(folders, folder)
		}
	}
	slices.Sort(folders)
	folders = slices.Compact(folders)
	if len(folders) < 5 {
		t.Fatalf("kvcast imports only %q of this module", folders)
	}
	for _, folder := range folders {
		if !slices.Contains(lines, "!"+folder) {
			t.Errorf(".dockerignore leaves out %s, which kvcast imports: add the line !%s", folder, folder)
		}
	}
}
