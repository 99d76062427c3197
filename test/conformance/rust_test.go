package conformance_test

import (
	"os"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

const (
	rustFolder = "../../clients/rust"
	// rustBuilt is where make clients builds the client.
	rustBuilt = "../../bin/clients/rust"
)

// rustExample returns an example of the client. It skips the test if make clients has not built it.
func rustExample(t *testing.T, name string) string {
	t.Helper()
	program := rustBuilt + "/debug/examples/" + name
	if _, err := os.Stat(program); err != nil {
		t.Skipf("%s is not here: make clients builds it", program)
	}
	return program
}

func TestRust(t *testing.T) {
	testclass.Peers(t)
	t.Parallel()
	process(t, rustExample(t, "conformance"))
}

func TestRustOwnTests(t *testing.T) {
	testclass.Peers(t)
	t.Parallel()
	rustExample(t, "conformance")
	command(t, rustFolder, "cargo", "test", "--quiet", "--locked", "--offline", "--target-dir", "../../bin/clients/rust")
}

// TestRustMessagesAreCurrent compares the generated code with the contract.
func TestRustMessagesAreCurrent(t *testing.T) {
	testclass.Packaging(t)
	t.Parallel()
	rustExample(t, "conformance")
	command(t, rustFolder, "cargo", "run", "--quiet", "--locked", "--manifest-path", "generate/Cargo.toml", "--target-dir", "../../bin/clients/rust-generate", "--", "--check")
}
