package routers_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/harness"
)

// gatewayView is what a gateway knows of a worker.
type gatewayView struct {
	Blocks  [][2]any // hash, and the tokens from the start
	Resumed int      // streams that were resumed from a sequence number
	States  int      // streams that began with all blocks
}

// contents returns the blocks with their tokens from the start, as text, by topic of the engine.
func (w *world) contents() map[string][]string {
	all := make(map[string][]string)
	for _, e := range w.engines {
		list := []string{}
		for path := range e.held {
			var prompt []uint32
			for p := path; p > 0; p >>= 2 {
				prompt = append(tokens(p), prompt...)
			}
			list = append(list, fmt.Sprintf("%d %v", e.hash(path), prompt))
		}
		slices.Sort(list)
		all[address(e)] = list
	}
	return all
}

// TestSMGClientEqualsTheEngines has gateways with SMG's generated client, from the start and late, which resume their streams.
func TestSMGClientEqualsTheEngines(t *testing.T) {
	testclass.Peers(t)
	need(t, smg)
	w := newWorld(t, "  smg:\n    enabled: true\n    workers: [{authority: \"second.example:1\", worker: e2}]\n", "--listen", fmt.Sprintf("127.0.0.1:%d", harness.FreePort(t)))
	server, err := w.process.Addr()
	if err != nil {
		t.Fatal(err)
	}
	authorities := []string{address(w.engines[0]), "second.example:1"}
	var views []map[string]gatewayView
	ask := func(i int, c *consumer) map[string][]string {
		c.ask(nil, &views[i])
		all := make(map[string][]string)
		for n, authority := range authorities {
			list := []string{}
			for _, b := range views[i][authority].Blocks {
				list = append(list, fmt.Sprintf("%d %v", int64(b[0].(float64)), b[1]))
			}
			slices.Sort(list)
			all[address(w.engines[n])] = list
		}
		return all
	}
	var gateways []*consumer
	join := func() {
		gateways = append(gateways, startConsumer(t, smg, append([]string{"testdata/gateway.py", server, fmt.Sprint(len(gateways))}, authorities...)...))
		views = append(views, nil)
	}
	check := func(when string) {
		t.Helper()
		want := w.contents()
		for i, c := range gateways {
			await(t, fmt.Sprintf("gateway %d %s", i, when), want, func() map[string][]string { return ask(i, c) })
		}
	}
	join()
	w.steps(100)
	check("at the start")
	join()
	check("that joins late") // a gateway that resumes while the state of another one is built may get all blocks again
	w.steps(100)
	check("after a late join")
	for i, view := range views {
		for authority, v := range view {
			if v.States != 1 || i == 0 && v.Resumed == 0 {
				t.Errorf("gateway %d got all blocks of %s %d times, and resumed %d times: want once, and some", i, authority, v.States, v.Resumed)
			}
		}
	}
	w.engines[0].restart()
	w.steps(30)
	check("after a restart of an engine")
	w.restart()
	w.steps(30)
	check("after a restart of kvcast")
	for authority, v := range views[0] { // or more often, since the state of the other gateway is built meanwhile
		if v.States < 2 {
			t.Errorf("gateway 0 got all blocks of %s %d times: want at least 2, at the start and after the restart of kvcast", authority, v.States)
		}
	}
}
