// Command llmd runs llm-d's pool of KV events and its in-memory index, for package routers. Its arguments are tokens in a block, and then
// "connect" or "bind" and the ZeroMQ endpoint of its subscriber. Each line of its standard input is a list of prompts, and of its output a list for
// each prompt: for each block the pods that hold it, as POD/TIER. The first line is the endpoint.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"

	"github.com/go-logr/logr"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache/kvblock"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents/engineadapter"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

// model is the model of all prompts.
const model = "m"

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "llmd:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	if len(os.Args) != 4 {
		return fmt.Errorf("usage: llmd BLOCK_SIZE connect|bind ENDPOINT")
	}
	size, err := strconv.Atoi(os.Args[1])
	if err != nil {
		return err
	}
	log.SetLogger(logr.Discard())
	index, err := kvblock.NewInMemoryIndex(kvblock.DefaultInMemoryIndexConfig())
	if err != nil {
		return err
	}
	tokens, err := kvblock.NewChunkedTokenDatabase(&kvblock.TokenProcessorConfig{BlockSizeTokens: size})
	if err != nil {
		return err
	}
	cfg := kvevents.DefaultConfig()
	// In version 0.9.0, the index can lose a block that one goroutine stores while another removes it for another pod.
	cfg.Concurrency = 1
	pool := kvevents.NewPool(cfg, index, tokens, engineadapter.NewVLLMAdapter())
	pool.Start(ctx)
	subscribers := kvevents.NewSubscriberManager(pool)
	if err := subscribers.EnsureSubscriber(ctx, "kvcast", os.Args[3], cfg.TopicFilter, os.Args[2] == "connect"); err != nil {
		return err
	}
	fmt.Println(os.Args[3])
	in, out := bufio.NewScanner(os.Stdin), json.NewEncoder(os.Stdout)
	in.Buffer(nil, 64<<20)
	for in.Scan() {
		var prompts [][]uint32
		if err := json.Unmarshal(in.Bytes(), &prompts); err != nil {
			return err
		}
		answer := make([][][]string, len(prompts))
		for i, p := range prompts {
			if answer[i], err = holders(ctx, index, tokens, p); err != nil {
				return err
			}
		}
		if err := out.Encode(answer); err != nil {
			return err
		}
	}
	return in.Err()
}

// holders returns for each block of a prompt the pods that hold it.
func holders(ctx context.Context, index kvblock.Index, tokens kvblock.TokenProcessor, prompt []uint32) ([][]string, error) {
	keys, err := tokens.TokensToKVBlockKeys(kvblock.EmptyBlockHash, prompt, model, nil)
	if err != nil {
		return nil, err
	}
	all := make([][]string, len(keys))
	for i, key := range keys { // one at a time, since a lookup ends at the first block without pods
		found, err := index.Lookup(ctx, []kvblock.BlockHash{key}, nil)
		if err != nil {
			return nil, err
		}
		for _, pod := range found[key] {
			all[i] = append(all[i], pod.PodIdentifier+"/"+pod.DeviceTier)
		}
		slices.Sort(all[i])
	}
	return all, nil
}
