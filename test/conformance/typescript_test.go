package conformance_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// typescriptBuilt returns the folder in which make clients builds the client. It skips the test if it has not.
func typescriptBuilt(t *testing.T) string {
	t.Helper()
	folder := filepath.Join("..", "..", "bin", "clients", "typescript")
	if _, err := os.Stat(filepath.Join(folder, "build/conformance/runner.js")); err != nil {
		t.Skipf("%s is not here: make clients prepares it", folder)
	}
	return folder
}

func TestTypeScript(t *testing.T) {
	testclass.Peers(t)
	t.Parallel()
	process(t, "node", filepath.Join(typescriptBuilt(t), "build/conformance/runner.js"))
}

func TestTypeScriptOwnTests(t *testing.T) {
	testclass.Peers(t)
	t.Parallel()
	tests, err := filepath.Glob(filepath.Join(typescriptBuilt(t), "build/test/*.test.js"))
	if err != nil || len(tests) == 0 {
		t.Fatalf("no tests: %v", err)
	}
	for i, file := range tests {
		if tests[i], err = filepath.Abs(file); err != nil {
			t.Fatal(err)
		}
	}
	command(t, typescriptBuilt(t), append([]string{"node", "--test", "--test-force-exit"}, tests...)...)
}

// TestTypeScriptMessagesAreCurrent compares the generated code with the contract.
func TestTypeScriptMessagesAreCurrent(t *testing.T) {
	testclass.Packaging(t)
	t.Parallel()
	generator, err := filepath.Abs(filepath.Join(typescriptBuilt(t), "node_modules/.bin"))
	if err != nil {
		t.Fatal(err)
	}
	const folder = "../../clients/typescript"
	template, err := os.ReadFile(folder + "/buf.gen.yaml")
	if err != nil {
		t.Fatal(err)
	}
	into := t.TempDir()
	file := filepath.Join(into, "buf.gen.yaml")
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(string(template), "node_modules/.bin", generator)), 0o600); err != nil {
		t.Fatal(err)
	}
	command(t, folder, "../../bin/tools/buf", "generate", "--template", file, "--output", into)
	command(t, folder, "diff", "-r", "src/gen", filepath.Join(into, "src/gen"))
}
