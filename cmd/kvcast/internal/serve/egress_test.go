package serve

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/config"
	"github.com/kvcast/kvcast/internal/adapter/vllm"
)

func TestPublishersHaveAnEndpointForEachRank(t *testing.T) {
	got := endpoints(&config.ZMQ{Publishers: []config.Publisher{
		{Worker: "a", Bind: "tcp://*:5557", Replay: "tcp://*:5657", FirstRank: 4, DPSize: 2},
		{Worker: "b", Bind: "tcp://*:5567", DPSize: 1},
	}})
	want := []vllm.EndpointConfig{
		{Worker: "a", Rank: 4, Bind: "tcp://*:5557", Replay: "tcp://*:5657"},
		{Worker: "a", Rank: 5, Bind: "tcp://*:5558", Replay: "tcp://*:5658"},
		{Worker: "b", Rank: 0, Bind: "tcp://*:5567"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("endpoints (-want +got):\n%s", diff)
	}
}
