package packaging_test

import (
	"archive/zip"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/harness"
)

const (
	module  = "github.com/kvcast/kvcast"
	version = "v0.0.1"
)

// TestGoInstallWithoutCgo installs the latest version of kvcast's module from a module proxy in files, in an environment without
// a C compiler, and runs the program. The dependencies come from the module cache.
func TestGoInstallWithoutCgo(t *testing.T) {
	testclass.Packaging(t)
	dir := t.TempDir()
	goFrom := publishRelease(t, dir)
	goFrom(dir, "install", module+"/cmd/kvcast@latest")
	output, err := exec.CommandContext(harness.Context(t), filepath.Join(dir, "bin", "kvcast"), "version").Output()
	if want := "kvcast " + version + " (without libzmq)\n"; err != nil || string(output) != want {
		t.Errorf("kvcast version: got %q, %v; want %q", output, err, want)
	}
}

// TestGoGetClient builds a program with the latest version of package client, as TestGoInstallWithoutCgo does.
func TestGoGetClient(t *testing.T) {
	testclass.Packaging(t)
	dir := t.TempDir()
	goFrom := publishRelease(t, dir)
	router := filepath.Join(dir, "router")
	if err := os.Mkdir(router, 0o700); err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(filepath.Join("..", "..", "examples", "follow", "main.go"))
	if err == nil {
		err = os.WriteFile(filepath.Join(router, "main.go"), program, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	goFrom(router, "mod", "init", "example.com/router")
	goFrom(router, "get", module+"/client@latest")
	goFrom(router, "build", "-mod=mod", ".")
	// It has a line for each module whose requirements matter. "go list -m all" would need files of modules that nothing is built from.
	sums, err := os.ReadFile(filepath.Join(router, "go.sum"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(sums), module+"/client ") || strings.Contains(string(sums), module+" ") {
		t.Errorf("modules of the program, want that of the client, and not that of the server:\n%s", sums)
	}
}

// publishRelease publishes a release of the modules to a module proxy in files, below dir. It returns a function that runs the go
// command in a folder, with this proxy and the module cache as the only sources, and without cgo. It installs to bin in dir.
func publishRelease(t *testing.T, dir string) func(folder string, args ...string) string {
	t.Helper()
	goroot, gocache, modcache := goEnv(t, "GOROOT"), goEnv(t, "GOCACHE"), goEnv(t, "GOMODCACHE")
	root, proxy, release := filepath.Join("..", ".."), filepath.Join(dir, "proxy"), filepath.Join(dir, "release")
	files := []string{"go.work", "tools/scripts/modules.sh"}
	folders := strings.Fields(script(t, root, "list"))
	for _, folder := range folders {
		files = append(files, filepath.Join(folder, "go.mod"))
	}
	for _, name := range files {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err == nil {
			err = os.MkdirAll(filepath.Dir(filepath.Join(release, name)), 0o700)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(release, name), text, 0o700)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	script(t, release, "release", version)
	for _, folder := range folders {
		publish(t, path.Join(module, filepath.ToSlash(folder)), filepath.Join(root, folder), filepath.Join(release, folder, "go.mod"), proxy)
	}

	return func(folder string, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), filepath.Join(goroot, "bin", "go"), args...)
		cmd.Dir = folder
		cmd.Env = []string{
			"PATH=" + filepath.Join(goroot, "bin"), "HOME=" + dir, "CGO_ENABLED=0", "GOTOOLCHAIN=local",
			"GOBIN=" + filepath.Join(dir, "bin"), "GOCACHE=" + gocache, "GOMODCACHE=" + filepath.Join(dir, "modules"),
			"GOPROXY=file://" + proxy + ",file://" + filepath.Join(modcache, "cache", "download"), "GOSUMDB=off",
			"GOFLAGS=-modcacherw -trimpath", // the test deletes the modules; packages in the build cache do not depend on directories
		}
		output, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, output)
		}
		return string(output)
	}
}

func goEnv(t *testing.T, name string) string {
	t.Helper()
	value, err := exec.CommandContext(harness.Context(t), "go", "env", name).Output()
	if err != nil {
		t.Fatalf("go env %s: %v", name, err)
	}
	return strings.TrimSpace(string(value))
}

// publish writes the files of a module, with another go.mod, to a module proxy.
func publish(t *testing.T, name, root, goMod, proxy string) {
	t.Helper()
	to := filepath.Join(proxy, name, "@v")
	if err := os.MkdirAll(to, 0o700); err != nil {
		t.Fatal(err)
	}
	mod, err := os.ReadFile(goMod)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"list": version + "\n", version + ".info": fmt.Sprintf(`{"Version":%q,"Time":"2026-01-01T00:00:00Z"}`, version), version + ".mod": string(mod),
	} {
		if err := os.WriteFile(filepath.Join(to, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	file, err := os.Create(filepath.Join(to, version+".zip"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	archive := zip.NewWriter(file)
	err = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil || rel == "." {
			return err
		}
		if entry.IsDir() {
			_, noModule := os.Stat(filepath.Join(path, "go.mod"))
			if noModule == nil || strings.HasPrefix(entry.Name(), ".") || rel == "bin" { // modules of their own are no part of this one
				return filepath.SkipDir
			}
			return nil
		}
		if !entry.Type().IsRegular() || strings.HasSuffix(rel, "_test.go") || strings.Contains(rel, "testdata") {
			return nil
		}
		text := mod
		if rel != "go.mod" {
			if text, err = os.ReadFile(path); err != nil {
				return err
			}
		}
		w, err := archive.Create(name + "@" + version + "/" + filepath.ToSlash(rel))
		if err == nil {
			_, err = w.Write(text)
		}
		return err
	})
	if err == nil {
		err = archive.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
}
