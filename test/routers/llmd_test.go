package routers_test

import (
	"fmt"
	"slices"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// prompts are all prompts of the greatest length: they have every block.
func prompts() (all [][]uint32) {
	for n := range 1 << (2 * depth) {
		var prompt []uint32
		for i := depth - 1; i >= 0; i-- {
			digit := uint64(n) >> (2 * i) % 4
			if digit == 0 {
				prompt = nil
				break
			}
			prompt = append(prompt, tokens(digit)...)
		}
		if prompt != nil {
			all = append(all, prompt)
		}
	}
	return all
}

// holders returns the pods that hold each block of each prompt, as llm-d knows them.
func (w *world) holders() [][][]string {
	var all [][][]string
	for _, prompt := range prompts() {
		path, blocks := uint64(0), [][]string{}
		for i := 0; i < len(prompt); i += blockSize {
			path = path*4 + uint64(prompt[i])
			var pods []string
			for _, e := range w.engines {
				if e.held[path] {
					pods = append(pods, address(e)+"/gpu")
				}
			}
			slices.Sort(pods)
			blocks = append(blocks, pods)
		}
		all = append(all, blocks)
	}
	return all
}

func (w *world) awaitLLMD(when string, pools ...*consumer) {
	w.t.Helper()
	for i, pool := range pools {
		await(w.t, fmt.Sprintf("pool %d %s", i, when), w.holders(), func() (got [][][]string) {
			pool.ask(prompts(), &got)
			return got
		})
	}
	blocks := 0
	for _, e := range w.engines {
		blocks += len(e.held)
	}
	w.t.Logf("%s, %d pools of llm-d hold exactly the %d blocks of %d engines", when, len(pools), blocks, len(w.engines))
}

// TestLLMDPoolEqualsTheEngines has pools of llm-d that connect to kvcast, from the start and late, and one that kvcast connects to,
// while engines lose batches and restart, and kvcast restarts.
func TestLLMDPoolEqualsTheEngines(t *testing.T) {
	testclass.Peers(t)
	need(t, llmd)
	central := fmt.Sprintf("tcp://127.0.0.1:%d", harness.FreePort(t))
	w := newWorld(t, "    connect: [\""+central+"\"]\n")
	start := func(how, endpoint string) *consumer {
		c := startConsumer(t, llmd, fmt.Sprint(blockSize), how, endpoint)
		if _, err := c.out.ReadString('\n'); err != nil {
			t.Fatalf("start llm-d's pool: %v: %s", err, c.err)
		}
		return c
	}
	pools := []*consumer{start("connect", w.bind), start("bind", central)}
	w.live(func() { pools = append(pools, start("connect", w.bind)) }, func(when string) { w.awaitLLMD(when, pools...) })
	w.engines[1].restart()
	w.restart()
	w.steps(5)
	w.awaitLLMD("after both", pools...)
}
