package routers_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// files are those that engines share, by path.
type files map[uint64]bool

// offload writes a block, and those before it, to files as vLLM does: those that are there already are announced again.
func (f files) offload(e *engine, path uint64) {
	e.t.Helper()
	var events []wire.Event
	for n := 1; n <= depth; n++ {
		prefix := path >> (2 * (depth - n))
		if !e.held[prefix] {
			break
		}
		f[prefix] = true
		events = append(events, wire.Event{
			Kind: wire.KindStored, BlockHashes: []uint64{e.hash(prefix)}, Tokens: tokens(prefix), BlockSize: blockSize,
			Medium: "STORAGE", HasParent: n > 1, Parent: e.hash(prefix >> 2),
		})
	}
	publish := e.publisher.Publish
	if e.random.IntN(10) == 0 {
		publish = e.publisher.Drop
	}
	if _, err := publish(events...); err != nil {
		e.t.Fatal(err)
	}
}

// TestPoolEqualsWhatWorkersAnnounce has two engines that share files, and one that has its own. The engines evict, lose batches and restart, and kvcast
// restarts: the files stay.
func TestPoolEqualsWhatWorkersAnnounce(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	engines := []*engine{newEngine(t, 1), newEngine(t, 2), newEngine(t, 3)}
	engines[1].hashes = engines[0].hashes // engines that share files have the same hashes
	w := newPoolWorld(t, engines, "m", `{name: fs, model: m, sources: [{connect: "workers://disk"}]}`, "--journal", "file:"+t.TempDir())
	shared, own := make(files), make(files)
	change := func(n int) {
		t.Helper()
		for range n {
			w.steps(1)
			for i, e := range engines {
				if i < 2 {
					shared.offload(e, e.randomPath())
				} else {
					own.offload(e, e.randomPath())
				}
				e.flush()
			}
		}
	}
	check := func(when string) {
		t.Helper()
		for range 20 {
			path := engines[0].randomPath()
			prompt, tokens := promptOf(path), 0
			for n := 1; n <= depth && shared[path>>(2*(depth-n))]; n++ {
				tokens = n * blockSize
			}
			want := []string{}
			if tokens > 0 {
				pools := []client.PoolPrefix{{Pool: "fs", Tokens: tokens, Blocks: tokens / blockSize, Trust: kvcastv1.Trust_TRUST_DEGRADED, Reasons: []kvcastv1.DegradedReason{
					kvcastv1.DegradedReason_DEGRADED_REASON_CONNECTOR_TIER,
				}}}
				want = []string{fmt.Sprintf("e1 %v", pools), fmt.Sprintf("e2 %v", pools)}
			}
			got := func() []string {
				all := []string{}
				for _, m := range w.matchOf("m", prompt) {
					if len(m.Pools) > 0 {
						all = append(all, fmt.Sprintf("%s %v", m.Worker, m.Pools))
					}
				}
				slices.Sort(all)
				return all
			}
			await(t, fmt.Sprintf("the matches of %v %s", prompt, when), "", func() string { return cmp.Diff(want, got()) })
		}
		t.Logf("%s: %d blocks in shared files, %d in others", when, len(shared), len(own))
	}
	change(30)
	check("at the start")
	w.steps(60)
	check("after the engines have evicted")
	engines[0].restart()
	check("after a restart of an engine")
	change(5)
	w.restart()
	check("after a restart of kvcast")
	change(10)
	check("at the end")
}
