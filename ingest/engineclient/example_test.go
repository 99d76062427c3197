package engineclient_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/kvcast/kvcast/ingest/engineclient"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
)

// A Client reads a simulated engine, and calls a handler with its events. The first batch was lost, so
// the Client requests a replay.
func ExampleClient() {
	engine, err := simulator.NewPublisher(simulator.PublisherConfig{
		SocketConfig: simulator.SocketConfig{Replay: "tcp://127.0.0.1:*"},
	})
	if err != nil {
		log.Fatal(err)
	}
	batches := [][]wire.Event{
		{{Kind: wire.KindStored, BlockHashes: []uint64{11, 12}, Tokens: []uint32{1, 2, 3, 4}, BlockSize: 2}},
		{{Kind: wire.KindRemoved, BlockHashes: []uint64{11}}, {Kind: wire.KindCleared}},
	}
	if _, err := engine.Drop(batches[0]...); err != nil {
		log.Fatal(err)
	}

	done := make(chan struct{})
	handler := engineclient.HandlerFunc(func(_ context.Context, e *engineclient.Event) error {
		switch e.Kind {
		case engineclient.EventStored:
			fmt.Println("batch", e.Seq, "of", e.Worker, "stored", e.BlockHashes, "of", e.BlockSize, "tokens")
		case engineclient.EventRemoved:
			fmt.Println("batch", e.Seq, "of", e.Worker, "removed", e.BlockHashes)
		case engineclient.EventCleared:
			fmt.Println("batch", e.Seq, "of", e.Worker, "cleared all")
			close(done)
		case engineclient.EventRestarted:
			fmt.Println(e.Worker, "restarted: its cache is empty")
		case engineclient.EventGap:
			fmt.Println("batches", e.Gap.FirstSeq, "to", e.Gap.LastSeq, "of", e.Worker, "are lost")
		}
		return nil
	})
	client, err := engineclient.New(engineclient.Config{
		Worker:  "vllm-0",
		Connect: engine.Endpoint(), // or Host, with vLLM's ports by default
		Replay:  engine.ReplayEndpoint(),
	}, handler)
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	if err := client.Connect(ctx); err != nil {
		log.Fatal(err)
	}
	if err := engine.WaitSubscribed(ctx, 1); err != nil {
		log.Fatal(err)
	}
	cancel()
	if _, err := engine.Publish(batches[1]...); err != nil {
		log.Fatal(err)
	}
	<-done
	if err := errors.Join(client.Close(), engine.Close()); err != nil {
		log.Fatal(err)
	}
	fmt.Println("handled", client.Stats().Handled, "events up to batch", client.Stats().HandledSeq)

	// Output:
	// batch 0 of vllm-0 stored [11 12] of 2 tokens
	// batch 1 of vllm-0 removed [11]
	// batch 1 of vllm-0 cleared all
	// handled 3 events up to batch 1
}

// A handler may be set after Connect. Events read before are buffered.
func ExampleClient_SetHandler() {
	engine, err := simulator.NewPublisher(simulator.PublisherConfig{
		SocketConfig: simulator.SocketConfig{Replay: "tcp://127.0.0.1:*"},
	})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := engine.Publish(wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{7}}); err != nil {
		log.Fatal(err)
	}

	client, err := engineclient.New(engineclient.Config{Connect: engine.Endpoint(), Replay: engine.ReplayEndpoint()}, nil)
	if err != nil {
		log.Fatal(err)
	}
	if err := client.Connect(context.Background()); err != nil {
		log.Fatal(err)
	}

	done := make(chan struct{})
	err = client.SetHandler(engineclient.HandlerFunc(func(_ context.Context, e *engineclient.Event) error {
		fmt.Println("batch", e.Seq, e.Kind, e.BlockHashes)
		close(done)
		return nil
	}))
	if err != nil {
		log.Fatal(err)
	}
	<-done
	if err := errors.Join(client.Close(), engine.Close()); err != nil {
		log.Fatal(err)
	}
	fmt.Println(client.SetHandler(nil))
	fmt.Println(client.Reconnect(context.Background()))

	// Output:
	// batch 0 removed [7]
	// handler is nil
	// client is closed
}

// ReplayFrom reads an engine's replay buffer from a seq on.
func ExampleClient_ReplayFrom() {
	engine, err := simulator.NewPublisher(simulator.PublisherConfig{
		SocketConfig: simulator.SocketConfig{Replay: "tcp://127.0.0.1:*"},
	})
	if err != nil {
		log.Fatal(err)
	}
	for hash := range uint64(4) {
		if _, err := engine.Publish(wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{hash}}); err != nil {
			log.Fatal(err)
		}
	}

	show := engineclient.HandlerFunc(func(_ context.Context, e *engineclient.Event) error {
		fmt.Println("batch", e.Seq, e.Kind, e.BlockHashes)
		return nil
	})
	client, err := engineclient.New(engineclient.Config{Connect: engine.Endpoint(), Replay: engine.ReplayEndpoint()}, show)
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	if err := errors.Join(client.ReplayFrom(ctx, 2, show), engine.Close()); err != nil {
		log.Fatal(err)
	}
	cancel()

	// Output:
	// batch 2 removed [2]
	// batch 3 removed [3]
}

// The error names each invalid field.
func ExampleConfig_Validate() {
	fmt.Println(engineclient.Config{Host: "10.0.0.256", PubPort: 70000}.Validate())

	// Output:
	// Host is "10.0.0.256": must be a host name, an IPv4 address, or an IPv6 address, without a port
	// PubPort is 70000: must be 1 to 65535
}

// Package wire encodes and decodes what engines publish.
func Example_encoder() {
	encoder := wire.Encoder{} // arrays, as vLLM writes them
	payload := encoder.AppendBatch(nil, &wire.Batch{
		Time:    1_700_000_000,
		HasTime: true,
		Events: []wire.Event{
			{Kind: wire.KindStored, BlockHashes: []uint64{7}, Tokens: []uint32{1, 2}, BlockSize: 2, Medium: "GPU"},
			{Kind: wire.KindRemoved, BlockHashes: []uint64{5}},
		},
	})

	var decoder wire.Decoder
	batch, err := decoder.Decode(payload)
	if err != nil {
		log.Fatal(err)
	}
	for _, e := range batch.Events {
		switch e.Kind {
		case wire.KindStored:
			fmt.Println("stored", e.BlockHashes, "of tokens", e.Tokens, "in", e.Medium)
		case wire.KindRemoved:
			fmt.Println("removed", e.BlockHashes)
		case wire.KindCleared:
			fmt.Println("cleared")
		}
	}

	// Output:
	// stored [7] of tokens [1 2] in GPU
	// removed [5]
}
