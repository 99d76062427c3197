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

// maxEdges is how many edges package client may add to the module graph of a program with gRPC.
const maxEdges = 60

// TestClientAddsFewModules compares the module graph of a program that imports package client with that of a program that imports
// gRPC alone.
func TestClientAddsFewModules(t *testing.T) {
	t.Parallel()
	const grpc = "google.golang.org/grpc"
	client, err := filepath.Abs(filepath.Join("..", "..", "client"))
	if err != nil {
		t.Fatal(err)
	}
	version := inModule(t, client, "list", "-m", "-f", "{{.Version}}", grpc)
	bare := moduleGraph(t, grpc, "-require="+grpc+"@"+strings.TrimSpace(version))

	edits := []string{"-require=" + module + "/client@v0.0.0"}
	for folder := range strings.Lines(script(t, filepath.Join("..", ".."), "list")) {
		if folder = strings.TrimSpace(folder); folder != "." {
			edits = append(edits, fmt.Sprintf("-replace=%s/%s=%s", module, folder, filepath.Join(client, "..", folder)))
		}
	}
	graph := moduleGraph(t, module+"/client", edits...)
	added := slices.DeleteFunc(slices.Clone(graph), func(edge string) bool { return slices.Contains(bare, edge) })
	t.Logf("%d edges with package client, %d with gRPC alone", len(graph), len(bare))
	if len(graph) > len(bare)+maxEdges {
		t.Errorf("got %d edges more than gRPC alone, want at most %d:\n%s", len(graph)-len(bare), maxEdges, strings.Join(added, "\n"))
	}
}

// moduleGraph returns the edges of the module graph of a program that imports a package. It skips the test if modules are neither
// in the module cache nor can be fetched.
func moduleGraph(t *testing.T, imported string, edits ...string) []string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":  "module example.com/router\n\ngo 1.26.0\n",
		"main.go": fmt.Sprintf("package main\n\nimport _ %q\n\nfunc main() {}\n", imported),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	inModule(t, dir, append([]string{"mod", "edit"}, edits...)...)
	inModule(t, dir, "list", "-mod=mod", "-deps", ".") // requires what the packages need
	return strings.Split(strings.TrimSpace(inModule(t, dir, "mod", "graph")), "\n")
}

// inModule runs the go command in the module of a folder, and returns what it prints.
func inModule(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOWORK=off")
	var failure strings.Builder
	cmd.Stderr = &failure
	out, err := cmd.Output()
	if err == nil {
		return string(out)
	}
	for _, unreachable := range []string{"dial tcp", "GOPROXY=off", "unexpected EOF", "TLS handshake", "502 Bad Gateway"} {
		if strings.Contains(failure.String(), unreachable) {
			t.Skipf("the module cache does not have all modules, and they cannot be fetched: %s", failure.String())
		}
	}
	t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, failure.String())
	return ""
}

// script runs tools/scripts/modules.sh of a checkout, and returns what it prints.
func script(t *testing.T, root string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), filepath.Join(root, "tools", "scripts", "modules.sh"), args...).CombinedOutput()
	if err != nil {
		t.Fatalf("modules.sh %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}
