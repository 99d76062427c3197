package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kvcast/kvcast/internal/simulator"
)

// summarise prints the summary of the soak.
func (s *soakRun) summarise() {
	s.fail("memory", checkMemory(s.rss))
	s.fail("true", s.fleet.truth.Counts().Meaningful())
	sum := s.fleet.summary()
	s.logf("in all: %d batches, %d events, %d blocks stored, %d removed, %d clears", sum.Batches, sum.Events, sum.Stored, sum.Removed, sum.Cleared)
	var faults []string
	for _, f := range simulator.AllFaults() {
		faults = append(faults, fmt.Sprintf("%s %d", f, sum.Faults[f]))
	}
	s.logf("faults: %d: %s", total(sum.Faults), strings.Join(faults, ", "))
	for _, r := range s.routers {
		got := r.totals()
		s.logf("subscriber %s: %d entries, %d gaps reported, %d restarts reported, %d workers removed, %d resumes, %d snapshots, %d times too slow",
			r.name, got.entries, got.gaps, got.restarts, got.removed, got.resumes, got.snapshots, got.stalls)
	}
	m := s.matcher.counts
	s.logf("matches: %d requests, %d answers compared with the view of subscriber %s, %d blocks", m.requests, m.compared, s.routers[0].name, m.blocks)
	s.logf("truth: %v", s.fleet.truth.Counts())
	s.logf("ranks compared in %d checks: %d equal, %d incomplete; %.0f repairs", s.checks, s.equal, s.incomplete, s.repaired)
	if len(s.rss) > 0 {
		s.logf("server: rss %d to %d MiB; at first %v; without subscribers %v", slices.Min(s.rss)>>20, slices.Max(s.rss)>>20, s.baselineRouters, s.baselineAlone)
	}
	if len(s.rss) < minMemoryChecks {
		s.logf("memory was not checked: this requires %d checks", minMemoryChecks)
	}
}

func total(faults map[simulator.Fault]uint64) (n uint64) {
	for f := range maps.Values(faults) {
		n += f
	}
	return n
}
