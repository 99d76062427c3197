package conformance_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// TestPackages builds what would be published of the clients, installs each in an empty project, and runs the programs of its README as they stand.
func TestPackages(t *testing.T) {
	testclass.Packaging(t)
	inPython(t)
	rustExample(t, "conformance")
	built, err := filepath.Abs(typescriptBuilt(t))
	if err != nil {
		t.Fatal(err)
	}
	command(t, "../..", "tools/scripts/dist-clients.sh")
	one := func(pattern string) string {
		t.Helper()
		all, err := filepath.Glob("../../bin/dist/clients/" + pattern)
		if err != nil || len(all) != 1 {
			t.Fatalf("got %v (%v), want one %s", all, err, pattern)
		}
		file, err := filepath.Abs(all[0])
		if err != nil {
			t.Fatal(err)
		}
		return file
	}
	write := func(folder, name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	address := serveTokens(t)
	prints := func(out, want string) {
		t.Helper()
		if !strings.Contains(out, want) {
			t.Errorf("got output\n%s\nwant %q in it", out, want)
		}
	}

	t.Run("python", func(t *testing.T) {
		folder := t.TempDir()
		command(t, folder, "python3", "-m", "venv", "venv")
		command(t, folder, "venv/bin/pip", "install", "--quiet", one("*.whl"))
		out := ""
		for _, program := range readmePrograms(t, pythonFolder+"/README.md", "python", address) {
			out += command(t, folder, "venv/bin/python", "-c", program)
		}
		prints(out, "w  4 TRUST_EXACT")
	})
	t.Run("rust", func(t *testing.T) {
		folder := t.TempDir()
		command(t, folder, "tar", "-xzf", one("*.crate"))
		command(t, folder, "cargo", "init", "--quiet", "--name", "empty", "--vcs", "none")
		command(t, folder, "cargo", "add", "--quiet", "--path", filepath.Join(folder, strings.TrimSuffix(filepath.Base(one("*.crate")), ".crate")))
		command(t, folder, "cargo", "add", "--quiet", "tokio", "--features", "macros,rt-multi-thread")
		target, err := filepath.Abs("../../bin/clients/rust-empty")
		if err != nil {
			t.Fatal(err)
		}
		for _, program := range readmePrograms(t, rustFolder+"/README.md", "rust,no_run", address) {
			if strings.Contains(program, "fn main") {
				write(filepath.Join(folder, "src"), "main.rs", program)
				prints(command(t, folder, "cargo", "run", "--quiet", "--target-dir", target), "1 workers at")
			}
		}
	})
	t.Run("typescript", func(t *testing.T) {
		folder := t.TempDir()
		write(folder, "package.json", `{"type": "module", "private": true}`)
		command(t, folder, "npm", "install", "--silent", one("*.tgz"))
		write(folder, "main.ts", readmePrograms(t, "../../clients/typescript/README.md", "ts", address)[0])
		command(t, folder, filepath.Join(built, "node_modules/.bin/tsc"), "--module", "nodenext", "--target", "es2023", "--typeRoots", filepath.Join(built, "node_modules/@types"), "--types", "node", "main.ts")
		out := command(t, folder, "node", "main.js")
		prints(out, "w m 2")
		prints(out, "entries")
	})
}
