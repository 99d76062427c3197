package main_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// contentOf returns a store of a block with a content and a name.
func contentOf(hash uint64, tokens ...uint32) wire.Event {
	return wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{hash}, Tokens: tokens, BlockSize: uint32(len(tokens))}
}

func goneOf(hash uint64, medium string) wire.Event {
	return wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{hash}, Medium: medium}
}

// inHost returns the event for the host pinned tier.
func inHost(e wire.Event) wire.Event {
	e.Medium = "CPU"
	return e
}

// twoSources starts an engine, an offloading source, and a server that reads both as one worker.
func twoSources(t *testing.T, consolidate string) (engine, offload *simulator.Publisher, s *process) {
	t.Helper()
	engine, offload = publisherOf(t, simulator.SocketConfig{}), publisherOf(t, simulator.SocketConfig{})
	file := filepath.Join(t.TempDir(), "kvcast.yaml")
	text := fmt.Sprintf(`workers:
  - name: w
    consolidate: %s
    sources:
      - {engine: GPU, connect: %q, replay: %q}
      - {engine: KVBM, connect: %q, replay: %q}
`, consolidate, engine.Endpoint(), engine.ReplayEndpoint(), offload.Endpoint(), offload.ReplayEndpoint())
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return engine, offload, serve(t, "--config", file)
}

func TestDedupEmitsABlockOnce(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	engine, offload, s := twoSources(t, "dedup")
	f := follow(t, s)
	publish(t, engine, contentOf(1, 7, 8))
	f.until("w", "stored [1]")
	publish(t, offload, inHost(contentOf(11, 7, 8)), inHost(contentOf(12, 9, 9)))
	if before := f.until("w", "stored [12]"); len(before) > 0 {
		t.Errorf("before the new block: got %q, want nothing", before)
	}
	found, err := s.Client().LookupBlocks(t.Context(), &kvcastv1.LookupBlocksRequest{BlockHashes: []uint64{1, 12}})
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[uint64][]string)
	for _, h := range found.GetHolders() {
		got[h.GetBlockHash()] = append(h.GetSources(), h.GetTier().String())
	}
	if diff := cmp.Diff(map[uint64][]string{1: {"vllm", "kvbm", "TIER_DEVICE"}, 12: {"kvbm", "TIER_DEVICE"}}, got); diff != "" {
		t.Errorf("sources and tiers (-want +got):\n%s", diff)
	}
	out := kvcast(t, nil, "workers", "--addr", s.Address()).out
	for _, p := range []*simulator.Publisher{engine, offload} {
		if n := strings.Count(out, p.Endpoint()); n != 1 {
			t.Errorf("lines of workers for %s: got %d, want 1:\n%s", p.Endpoint(), n, out)
		}
	}
	publish(t, engine, goneOf(1, ""), contentOf(3, 5, 5))
	if before := f.until("w", "stored [3]"); len(before) > 0 {
		t.Errorf("while one source has the block: got %q, want nothing", before)
	}
	publish(t, offload, goneOf(11, "CPU"), inHost(contentOf(14, 6, 6)))
	if before := f.until("w", "stored [14]"); !slices.Equal(before, []string{"gone [1] TIER_DEVICE"}) {
		t.Errorf("after the last source removed the block: got %q, want a remove with the first block hash", before)
	}
}

func TestPassthroughEmitsEachSource(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	engine, offload, s := twoSources(t, "passthrough")
	f := follow(t, s)
	publish(t, engine, contentOf(1, 7, 8))
	f.until("w", "stored [1]")
	publish(t, offload, inHost(contentOf(11, 7, 8)), goneOf(11, "CPU"), inHost(contentOf(12, 9, 9)))
	f.until("w", "stored [11]")
	if before := f.until("w", "stored [12]"); !slices.Equal(before, []string{"gone [11] TIER_HOST_PINNED"}) {
		t.Errorf("got %q, want a remove in its own tier", before)
	}
}
