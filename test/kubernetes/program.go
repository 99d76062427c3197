package kubernetes

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// Program returns the path of a program that a make target builds into bin. It skips the test if the program is missing.
func Program(t testing.TB, name, target string) string {
	t.Helper()
	path := filepath.Join(Root(t), "bin", name)
	if _, err := os.Stat(path); err != nil {
		t.Skipf("bin/%s is missing: run make %s to build it", name, target)
	}
	return path
}

// installed returns the path of a program of a Debian package. It skips the test if the program is missing.
func installed(t testing.TB, name, debianPackage string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("%s is not installed: run apt-get install %s", name, debianPackage)
	}
	return path
}

// Root returns the root directory of the repository: the nearest one above the package under test that has a Makefile.
func Root(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "Makefile")); err == nil {
			return dir
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			t.Fatal("no directory above the package under test has a Makefile")
		}
		dir = parent
	}
}
