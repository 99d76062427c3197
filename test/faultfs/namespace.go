//go:build !linux

package faultfs

import (
	"testing"

	"github.com/kvcast/kvcast/test/harness"
)

// RunTests is harness.RunTests: nothing is mounted.
func RunTests(m *testing.M) int { return harness.RunTests(m) }
