// Command llmd measures llm-d's in-memory index on the workload of a file, and prints the figures as JSON.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"github.com/go-logr/logr"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache/kvblock"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/kvcast/kvcast/test/indexers"
)

// rounds is 1, since the index is slow.
const rounds = 1

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: llmd FILE")
		os.Exit(2)
	}
	log.SetLogger(logr.Discard())
	w, err := indexers.ReadFile(os.Args[1])
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(indexers.Measure(w, rounds, newIndex))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "llmd:", err)
		os.Exit(1)
	}
}

// index is llm-d's index. Engine keys and request keys are the block hashes.
type index struct {
	index   *kvblock.InMemoryIndex
	entries [indexers.Workers][]kvblock.PodEntry
	keys    []kvblock.BlockHash
	// prefixes are the lengths of the prefixes that the last Match found.
	prefixes map[string]int
}

func newIndex() indexers.Index {
	// By default, a block has at most 10 pods.
	config := kvblock.DefaultInMemoryIndexConfig()
	config.PodCacheSize = indexers.Workers
	inMemory, err := kvblock.NewInMemoryIndex(config)
	check(err)
	x := &index{index: inMemory, prefixes: make(map[string]int)}
	for i := range x.entries {
		x.entries[i] = []kvblock.PodEntry{{PodIdentifier: fmt.Sprintf("worker-%d", i), DeviceTier: "gpu"}}
	}
	return x
}

func check(err error) {
	if err != nil {
		panic("llm-d's index: " + err.Error())
	}
}

// hashes returns block hashes in the index's form, in reused memory.
func (x *index) hashes(blocks []uint64) []kvblock.BlockHash {
	x.keys = x.keys[:0]
	for _, b := range blocks {
		x.keys = append(x.keys, kvblock.BlockHash(b))
	}
	return x.keys
}

func (x *index) Apply(e *indexers.Event) {
	keys, entries := x.hashes(e.Blocks), x.entries[e.Worker]
	if e.Stored {
		check(x.index.Add(context.Background(), keys, keys, entries))
		return
	}
	for _, k := range keys {
		check(x.index.Evict(context.Background(), k, entries))
	}
}

// Match implements indexers.Index: a lookup, and the longest prefix of each pod, as llm-d's scorer determines it.
func (x *index) Match(p indexers.Prompt) {
	keys := x.hashes(p.Blocks)
	found, err := x.index.Lookup(context.Background(), keys, nil)
	check(err)
	clear(x.prefixes)
	for depth, k := range keys {
		extended := false
		for _, pod := range found[k] {
			if x.prefixes[pod.PodIdentifier] == depth {
				x.prefixes[pod.PodIdentifier] = depth + 1
				extended = true
			}
		}
		if !extended {
			return
		}
	}
}

func (x *index) Matched() (workers, blocks int) {
	for _, n := range x.prefixes {
		blocks += n
	}
	return len(x.prefixes), blocks
}
