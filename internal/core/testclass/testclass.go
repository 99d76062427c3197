// Package testclass declares the classes of tests, by which runs select them. A test without a declaration is of class quick. Any
// other test declares its class with a call in its own body, before it does anything else:
//
//	func TestExhaustiveWorlds(t *testing.T) {
//		testclass.Exhaustive(t)
//
// The environment variable KVCAST_TEST_CLASSES selects classes: names separated by commas, or "all". Tests of other
// classes are skipped. Command test/run reads the declarations from the source, and so runs what a class needs alone.
package testclass

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// Class is a class of tests.
type Class string

// The classes.
const (
	ClassQuick      Class = "quick"      // needs no program of others, and some seconds at most
	ClassExhaustive Class = "exhaustive" // computes for long: whole spaces of states, many random inputs
	ClassProcess    Class = "process"    // starts kvcast as a program many times, breaks it, or needs a browser or Prometheus
	ClassCluster    Class = "cluster"    // starts several servers and NATS servers
	ClassSoak       Class = "soak"       // measures over minutes
	ClassPackaging  Class = "packaging"  // builds or deploys what users install
	ClassPeers      Class = "peers"      // runs programs of other projects, which a make target prepares
	ClassLive       Class = "live"       // runs an engine's own code, which a make target prepares
)

// Classes are all classes: what "all" selects.
var Classes = []Class{
	ClassQuick, ClassExhaustive, ClassProcess, ClassCluster, ClassSoak, ClassPackaging, ClassPeers, ClassLive,
}

// Variable is the environment variable that selects classes.
const Variable = "KVCAST_TEST_CLASSES"

// Exhaustive declares a test of ClassExhaustive.
func Exhaustive(t testing.TB) { t.Helper(); declare(t, ClassExhaustive) }

// Process declares a test of ClassProcess.
func Process(t testing.TB) { t.Helper(); declare(t, ClassProcess) }

// Cluster declares a test of ClassCluster.
func Cluster(t testing.TB) { t.Helper(); declare(t, ClassCluster) }

// Soak declares a test of ClassSoak.
func Soak(t testing.TB) { t.Helper(); declare(t, ClassSoak) }

// Packaging declares a test of ClassPackaging.
func Packaging(t testing.TB) { t.Helper(); declare(t, ClassPackaging) }

// Peers declares a test of ClassPeers.
func Peers(t testing.TB) { t.Helper(); declare(t, ClassPeers) }

// Live declares a test of ClassLive.
func Live(t testing.TB) { t.Helper(); declare(t, ClassLive) }

// WithoutRace declares a test that runs only without the race detector, because it measures memory, or because one goroutine
// computes for long, which takes ten times as long with the race detector.
func WithoutRace(t testing.TB) {
	t.Helper()
	if RaceEnabled {
		t.Skip("it runs without the race detector")
	}
}

// FullVariable is the environment variable that makes tests of any class run at full size, unless it is empty.
const FullVariable = "KVCAST_TEST_FULL"

// Full reports whether tests that have a size run at full size: ClassExhaustive is selected, or FullVariable is set.
func Full() bool {
	return Selected(ClassExhaustive, os.Getenv(Variable)) || os.Getenv(FullVariable) != ""
}

// Size returns one of two sizes of a test: one that takes seconds, or that of Full.
func Size(quick, full int) int {
	if Full() {
		return full
	}
	return quick
}

func declare(t testing.TB, class Class) {
	t.Helper()
	if !Selected(class, os.Getenv(Variable)) {
		t.Skipf("it is of class %s: set %s=%s to run it", class, Variable, class)
	}
}

// Selected reports whether a value of Variable selects a class.
func Selected(class Class, value string) bool {
	if value == "all" {
		return true
	}
	if value == "" {
		return class == ClassQuick
	}
	return slices.Contains(strings.Split(value, ","), string(class))
}
