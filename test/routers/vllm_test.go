package routers_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/harness"
)

// hashes returns the blocks that a subscriber in Python holds in the device tier, by topic.
func (c *consumer) hashes() map[string][]uint64 {
	c.t.Helper()
	var held map[string][][2]any
	c.ask(nil, &held)
	all := make(map[string][]uint64)
	for topic, blocks := range held {
		list := []uint64{}
		for _, b := range blocks {
			if b[1] == "GPU" {
				list = append(list, uint64(b[0].(float64)))
			}
		}
		slices.Sort(list)
		all[topic] = list
	}
	return all
}

// TestVLLMSubscriberEqualsTheEngines has subscribers with vLLM's own message classes, with and without replay, from the start and
// late. Each compares each batch with what vLLM's classes encode.
func TestVLLMSubscriberEqualsTheEngines(t *testing.T) {
	testclass.Peers(t)
	need(t, python, vllm)
	pub, replay := harness.FreePort(t), harness.FreePort(t)
	w := newWorld(t, fmt.Sprintf("    publishers: [{worker: e1, bind: \"tcp://127.0.0.1:%d\", replay: \"tcp://127.0.0.1:%d\"}]\n", pub, replay))
	start := func(endpoint, replay string) *consumer {
		return startConsumer(t, python, "testdata/subscriber.py", vllm, endpoint, replay)
	}
	one := func() *consumer {
		return start(fmt.Sprintf("tcp://127.0.0.1:%d", pub), fmt.Sprintf("tcp://127.0.0.1:%d", replay))
	}
	all := []*consumer{start(w.bind, "")}
	single := []*consumer{one()}
	check := func(when string) {
		t.Helper()
		want := w.hashes()
		for i, c := range all {
			await(t, fmt.Sprintf("subscriber %d %s", i, when), want, c.hashes)
		}
		for i, c := range single {
			await(t, fmt.Sprintf("subscriber %d with replay %s", i, when), map[string][]uint64{topic(w.engines[0]): want[topic(w.engines[0])]}, func() map[string][]uint64 {
				w.engines[0].touch() // a gap is seen when the next batch comes
				return c.hashes()
			})
		}
	}
	w.live(func() { all, single = append(all, start(w.bind, "")), append(single, one()) }, check)
}
