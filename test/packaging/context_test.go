package packaging_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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

// TestImagesDownloadTheDependenciesOfAllModules checks that both images are built with the go.mod files of all modules, before their
// sources change.
func TestImagesDownloadTheDependenciesOfAllModules(t *testing.T) {
	root := filepath.Join("..", "..")
	text, err := os.ReadFile(filepath.Join(root, "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	images := strings.Count(string(text), "RUN go mod download\n")
	want := []string{"COPY go.work go.work.sum go.mod go.sum ./\n"}
	for folder := range strings.FieldsSeq(script(t, root, "list")) {
		if folder != "." {
			want = append(want, fmt.Sprintf("COPY %[1]s/go.mod %[1]s/go.sum %[1]s/\n", folder))
		}
	}
	for _, line := range want {
		if got := strings.Count(string(text), line); got != images || images == 0 {
			t.Errorf("Dockerfile: got %d times %q, want %d", got, line, images)
		}
	}
}
