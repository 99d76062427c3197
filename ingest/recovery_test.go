package ingest_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/test/harness"
)

// checkRawIDs checks that the events of each source have contiguous raw event ids.
func checkRawIDs(t *testing.T, l *durableLane) {
	t.Helper()
	last := make(map[int]uint64)
	for _, c := range l.calls {
		for _, id := range c.rawIDs {
			if id != last[c.source]+1 {
				t.Errorf("source %d: raw event id %d after %d: %s", c.source, id, last[c.source], c.text)
			}
			last[c.source] = id
		}
	}
}

// recoverySeeds is how many random runs a test of recovery makes with each deployment and transport.
const recoverySeeds = 6

// forEachDeployment runs a test with each deployment, transport and seed.
func forEachDeployment(t *testing.T, replay bool, test func(t *testing.T, zmq config.ZMQ, d *deployment, seed uint64)) {
	harness.ForEachTransport(t, func(t *testing.T, zmq config.ZMQ) {
		for _, tt := range deployments {
			for seed := range uint64(recoverySeeds) {
				t.Run(fmt.Sprint(tt.name, " ", seed), func(t *testing.T) {
					t.Parallel()
					test(t, zmq, tt.make(t, replay), seed)
				})
			}
		}
	})
}

// When kvcast ends at any batch and starts again, its lanes get what they would have got without the end: each batch
// once, with the same tokens hashes and raw event ids.
func TestRecoveredWorkersContinueWhereTheyEnded(t *testing.T) {
	t.Parallel()
	forEachDeployment(t, true, func(t *testing.T, zmq config.ZMQ, d *deployment, seed uint64) {
		sink, _ := d.twoLives(t, zmq, seed, func(random *rand.Rand) { d.publish(random, random.IntN(30)) })
		for _, p := range d.publishers() {
			if diff := cmp.Diff(texts(d.uninterrupted(t, p)), texts(sink.of(d.worker, p))); diff != "" {
				t.Errorf("calls for %+v (-uninterrupted +recovered):\n%s", p, diff)
			}
		}
		checkRawIDs(t, sink.workers[d.worker])
		if got := sink.workers[d.worker].added; got != 1 || len(sink.removed) != 0 {
			t.Errorf("the second Ingest added the worker %d times, and %v were removed", got, sink.removed)
		}
	})
}

// A restart of the engine while kvcast does not run is detected, and the new engine's batches are read.
func TestRestartOfTheEngineWhileKvcastDoesNotRun(t *testing.T) {
	t.Parallel()
	forEachDeployment(t, true, func(t *testing.T, zmq config.ZMQ, d *deployment, seed uint64) {
		sink, _ := d.twoLives(t, zmq, seed, func(random *rand.Rand) {
			for _, p := range d.publishers() {
				c := d.caches[p]
				c.restart()
				c.must(c.RestartProcess(0))
				c.publish(random, 1+random.IntN(60)) // the seqs may pass those of the former process
			}
		})
		for _, p := range d.publishers() {
			got := texts(sink.of(d.worker, p))
			restarted := fmt.Sprintf("rank %d: restarted", p.Rank)
			at := slices.Index(got, restarted) // -1 if no call of the former process was stored
			if diff := cmp.Diff(texts(d.uninterrupted(t, p)), got[at+1:]); diff != "" {
				t.Errorf("calls for %+v after the restart (-new process +recovered):\n%s", p, diff)
			}
		}
	})
}

// Without a replay socket, a possible restart is reported, and each batch is delivered or reported as lost.
func TestRecoveryWithoutReplay(t *testing.T) {
	t.Parallel()
	forEachDeployment(t, false, func(t *testing.T, zmq config.ZMQ, d *deployment, seed uint64) {
		sink, lasts := d.twoLives(t, zmq, seed, func(random *rand.Rand) { d.publish(random, random.IntN(30)) })
		for p, last := range lasts {
			calls := sink.of(d.worker, p)
			checkAccount(t, calls, last)
			if n := sink.kept[p]; n > 0 && !strings.Contains(calls[n].text, "possible_restart") && !strings.Contains(calls[n-1].text, "joined_late") {
				t.Errorf("%+v: after the start %q, want a possible restart", p, calls[n].text)
			}
		}
	})
}

// What the replay socket no longer has is reported as lost.
func TestRecoveryAfterTheReplayForgot(t *testing.T) {
	t.Parallel()
	forEachDeployment(t, true, func(t *testing.T, zmq config.ZMQ, d *deployment, seed uint64) {
		sink, lasts := d.twoLives(t, zmq, seed, func(random *rand.Rand) {
			d.publish(random, 1+random.IntN(30))
			for _, c := range d.caches {
				c.must(c.ClearReplay())
			}
			d.publish(random, random.IntN(3))
		})
		for p, last := range lasts {
			checkAccount(t, sink.of(d.worker, p), last)
		}
	})
}

// checkAccount checks that calls for one publisher cover each seq up to the last once, in order.
func checkAccount(t *testing.T, calls []storedCall, last uint64) {
	t.Helper()
	next := uint64(0)
	for _, c := range calls {
		switch {
		case strings.Contains(c.text, "joined_late"):
			next = c.last + 1
		case strings.Contains(c.text, "restarted"):
			t.Errorf("a restart of an engine that did not restart")
		case c.first == 0 && c.last == 0 && strings.Contains(c.text, "gap"):
		case c.first != next:
			t.Errorf("%s after seq %d", c.text, next-1)
			next = c.last + 1
		default:
			next = c.last + 1
		}
	}
	if next != last+1 {
		t.Errorf("the last seq is %d, want %d", next-1, last)
	}
}
