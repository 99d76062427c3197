package packaging_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/kvcast/kvcast/test/harness"
)

// maxExposure is the highest exposure that systemd may find, in tenths; 100 is a service without restrictions.
const maxExposure = "15"

func TestSystemdUnitIsValidAndRestricted(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Skip("systemd-analyze is not installed: run apt-get install systemd")
	}
	unit, err := os.ReadFile(filepath.Join("..", "..", "deploy", "systemd", "kvcast.service"))
	if err != nil {
		t.Fatal(err)
	}
	// systemd-analyze requires the program of the unit to exist.
	program := []byte("ExecStart=/usr/local/bin/kvcast ")
	if !bytes.Contains(unit, program) {
		t.Fatalf("the unit has no line that begins with %s", program)
	}
	unit = bytes.Replace(unit, program, []byte("ExecStart=/bin/true "), 1)
	file := filepath.Join(t.TempDir(), "kvcast.service")
	if err := os.WriteFile(file, unit, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"verify", "--man=no", file},
		{"security", "--offline=true", "--threshold=" + maxExposure, file},
	} {
		output, err := exec.CommandContext(harness.Context(t), "systemd-analyze", args...).CombinedOutput()
		// verify exits with 0 if it ignores a line that it does not know.
		if err != nil || args[0] == "verify" && len(output) > 0 {
			t.Errorf("systemd-analyze %s: %v\n%s", args[0], err, output)
		}
	}
}
