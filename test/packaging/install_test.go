package packaging_test

import (
	"archive/zip"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
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

// TestGoInstallWithoutCgo installs the latest version of this module from a module proxy in files, in an environment without
// a C compiler, and runs the program. The dependencies come from the module cache.
func TestGoInstallWithoutCgo(t *testing.T) {
	testclass.Packaging(t)
	goroot, gocache, modcache := goEnv(t, "GOROOT"), goEnv(t, "GOCACHE"), goEnv(t, "GOMODCACHE")
	dir := t.TempDir()
	proxy := filepath.Join(dir, "proxy")
	publish(t, filepath.Join("..", ".."), filepath.Join(proxy, module, "@v"))

	install := exec.CommandContext(t.Context(), filepath.Join(goroot, "bin", "go"), "install", module+"/cmd/kvcast@latest")
	install.Dir = dir
	install.Env = []string{
		"PATH=" + filepath.Join(goroot, "bin"), "HOME=" + dir, "CGO_ENABLED=0", "GOTOOLCHAIN=local",
		"GOBIN=" + filepath.Join(dir, "bin"), "GOCACHE=" + gocache, "GOMODCACHE=" + filepath.Join(dir, "modules"),
		"GOPROXY=file://" + proxy + ",file://" + filepath.Join(modcache, "cache", "download"), "GOSUMDB=off",
		"GOFLAGS=-modcacherw -trimpath", // the test deletes the modules; packages in the build cache do not depend on directories
	}
	if output, err := install.CombinedOutput(); err != nil {
		t.Fatalf("go install: %v\n%s", err, output)
	}
	output, err := exec.CommandContext(harness.Context(t), filepath.Join(dir, "bin", "kvcast"), "version").Output()
	if want := "kvcast " + version + " (without libzmq)\n"; err != nil || string(output) != want {
		t.Errorf("kvcast version: got %q, %v; want %q", output, err, want)
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

// publish writes the files of a version of the module in root to a directory of a module proxy.
func publish(t *testing.T, root, to string) {
	t.Helper()
	if err := os.MkdirAll(to, 0o700); err != nil {
		t.Fatal(err)
	}
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
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
		name, err := filepath.Rel(root, path)
		if err != nil || name == "." {
			return err
		}
		if entry.IsDir() {
			_, noModule := os.Stat(filepath.Join(path, "go.mod"))
			if noModule == nil || strings.HasPrefix(entry.Name(), ".") || name == "bin" { // modules of their own are no part of this one
				return filepath.SkipDir
			}
			return nil
		}
		if !entry.Type().IsRegular() || strings.HasSuffix(name, "_test.go") || strings.Contains(name, "testdata") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		w, err := archive.Create(module + "@" + version + "/" + filepath.ToSlash(name))
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
