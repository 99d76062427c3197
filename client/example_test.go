package client_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvcast/kvcast/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// plain returns the dial option of the examples: no TLS.
func plain() grpc.DialOption { return grpc.WithTransportCredentials(insecure.NewCredentials()) }

// A router with its own state starts with a snapshot. Another snapshot may follow at any time; the router then discards
// its state.
func ExampleClient_Subscribe() {
	kvcast := startKvcast()
	engine := kvcast.Engine("vllm-0")
	engine(prompt(10, 1, 2, 3, 4))

	c, err := client.New(kvcast.Addr, plain())
	if err != nil {
		log.Fatal(err)
	}
	blocks := make(map[string]int) // number of stored blocks, by worker
	for u, err := range c.Subscribe(context.Background(), client.Config{}) {
		if err != nil {
			log.Fatal(err) // a permanent error
		}
		switch m := u.Message; {
		case u.Interruption != nil:
			fmt.Println("the stream is interrupted:", u.Interruption.Err)
		case m.GetSnapshotBegin() != nil:
			clear(blocks)
		case m.GetSnapshotEnd() != nil:
			fmt.Println("the snapshot is complete:", blocks, "at", u.Position.Seq)
			engine(prompt(20, 5, 6, 7, 8, 9, 10, 11, 12))
		}
		for _, b := range u.Message.GetSnapshotBlocks() {
			for _, ev := range b.GetEvents() {
				blocks[b.GetWorker()] += len(ev.GetStored().GetBlockHashes())
			}
		}
		for _, e := range u.Message.GetEntries() {
			for _, ev := range e.GetEvents() {
				blocks[e.GetWorker()] += len(ev.GetStored().GetBlockHashes())
			}
		}
		if u.Position.Seq == 3 {
			fmt.Println("after entry 3:", blocks)
			break
		}
	}
	kvcast.Stop()

	// Output:
	// the snapshot is complete: map[vllm-0:1] at 2
	// after entry 3: map[vllm-0:3]
}

// A program that stores its position together with its results resumes after the position in the next run. The first
// run starts with a snapshot.
func ExampleAfter() {
	kvcast := startKvcast()
	engine := kvcast.Engine("vllm-0")
	dir, err := os.MkdirTemp("", "position")
	if err != nil {
		log.Fatal(err)
	}
	file := filepath.Join(dir, "position")

	c, err := client.New(kvcast.Addr, plain())
	if err != nil {
		log.Fatal(err)
	}
	for run := 1; run <= 2; run++ {
		text, err := os.ReadFile(file)
		if err != nil && run > 1 {
			log.Fatal(err)
		}
		var at client.Position
		if err := at.UnmarshalText(text); err != nil {
			log.Fatal(err)
		}
		for u, err := range c.Subscribe(context.Background(), client.Config{Start: client.After(at)}) {
			if err != nil {
				log.Fatal(err)
			}
			if u.Message.GetSnapshotEnd() != nil {
				fmt.Println("run", run, "begins with a snapshot up to entry", u.Position.Seq)
			}
			for _, e := range u.Message.GetEntries() {
				fmt.Println("run", run, "gets entry", e.GetSeq())
			}
			if u.Position.IsZero() {
				continue // the snapshot is not complete
			}
			text, err := u.Position.MarshalText()
			if err != nil {
				log.Fatal(err)
			}
			if err := os.WriteFile(file, text, 0o600); err != nil {
				log.Fatal(err)
			}
			if u.Position.Seq >= uint64(run) {
				break
			}
		}
		engine(prompt(10, 1, 2, 3, 4)) // between the runs
	}
	if err := os.RemoveAll(dir); err != nil {
		log.Fatal(err)
	}
	kvcast.Stop()

	// Output:
	// run 1 begins with a snapshot up to entry 1
	// run 2 gets entry 2
}

// A View finds the workers that hold the longest prefix of a prompt.
func ExampleView_Match() {
	kvcast := startKvcast()
	a, b := kvcast.Engine("vllm-a"), kvcast.Engine("vllm-b")
	a(prompt(10, 1, 2, 3, 4))
	b(prompt(70, 1, 2, 3, 4, 5, 6, 7, 8))

	c, err := client.New(kvcast.Addr, plain())
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	view, done := client.NewView(), make(chan error)
	go func() { done <- view.Follow(c.Subscribe(ctx, client.Config{})) }()
	if err := view.WaitReady(ctx); err != nil {
		log.Fatal(err)
	}
	for _, m := range view.Match(client.Prompt{Model: "m", Tokens: []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9}}) {
		fmt.Println(m.Endpoint, "has", m.Tokens, "tokens,", m.TierBlocks[kvcastv1.Tier_TIER_DEVICE], "blocks of them on the device")
	}
	cancel()
	if err := <-done; err != nil {
		log.Fatal(err)
	}
	kvcast.Stop()

	// Output:
	// vllm-b:8000 has 8 tokens, 2 blocks of them on the device
	// vllm-a:8000 has 4 tokens, 1 blocks of them on the device
}

// A router without a View asks the server. Match may be called from any number of goroutines.
func ExampleMatcher() {
	kvcast := startKvcast()
	kvcast.Engine("vllm-0")(prompt(10, 1, 2, 3, 4))
	kvcast.Engine("vllm-1")(prompt(20, 1, 2, 3, 4, 5, 6, 7, 8))

	c, err := client.New(kvcast.Addr, plain())
	if err != nil {
		log.Fatal(err)
	}
	matcher := c.NewMatcher()
	answer, err := matcher.Match(context.Background(), client.MatchRequest{
		Prompts: []client.Prompt{{Model: "m", Tokens: []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9}}},
		Limit:   4,
	})
	if err != nil {
		log.Fatal(err)
	}
	for _, m := range answer.Matches[0] { // the longest prefix comes first
		fmt.Println(m.Worker, m.Endpoint, m.Blocks, "blocks,", m.Tokens, "tokens,", m.Trust)
	}
	matcher.Close()
	kvcast.Stop()
	// Output:
	// vllm-1 vllm-1:8000 2 blocks, 8 tokens, TRUST_EXACT
	// vllm-0 vllm-0:8000 1 blocks, 4 tokens, TRUST_EXACT
}
