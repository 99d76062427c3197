package main_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

// engine starts a publisher, and a server that reads it as worker w.
func engine(t *testing.T, args ...string) (*simulator.Publisher, *process) {
	t.Helper()
	return engineWith(t, "", args...)
}

// engineWith is engine with further settings of the worker.
func engineWith(t *testing.T, settings string, args ...string) (*simulator.Publisher, *process) {
	t.Helper()
	p, err := simulator.NewPublisher(simulator.PublisherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Errorf("close publisher: %v", err)
		}
	})
	s := serve(t, append([]string{"--worker", "name=w,connect=" + p.Endpoint() + settings}, args...)...)
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	if err := p.WaitSubscribed(ctx, 1); err != nil {
		t.Fatal(err)
	}
	return p, s
}

func publish(t *testing.T, p *simulator.Publisher, events ...wire.Event) {
	t.Helper()
	if _, err := p.Publish(events...); err != nil {
		t.Fatal(err)
	}
}

func TestShutdownDeliversTheLastEntry(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	// The batch waits to be merged with a further batch, which is never sent.
	p, s := engine(t, "--batch-timeout", "15s")
	req := &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}}}
	stream, err := s.Client().Subscribe(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	c := checker.New(checker.Options{Tails: true})
	if err := c.Begin(req); err != nil {
		t.Fatal(err)
	}
	receive := func() error {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		if err := c.Receive(m); err != nil {
			t.Fatal(err)
		}
		return nil
	}
	for c.Position().GetSeq() < 1 { // the worker
		if err := receive(); err != nil {
			t.Fatal(err)
		}
	}
	publish(t, p, wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{7}, Tokens: []uint32{1, 2}, BlockSize: 2})
	s.AwaitSample(`kvcast_ingest_batches_total{worker="w"} 1`)

	if status := s.End(); status != 0 {
		t.Errorf("exit status: got %d, want 0", status)
	}
	for err = nil; err == nil; {
		err = receive()
	}
	if status.Code(err) != codes.Unavailable {
		t.Errorf("end of the stream: got %v, want UNAVAILABLE", err)
	}
	if got := c.View().Blocks("w", 0, kvcastv1.Tier_TIER_DEVICE); len(got) != 1 {
		t.Errorf("blocks: got %v, want the block of the waiting batch", got)
	}
}

func TestShutdownDoesNotWaitForASlowSubscriber(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	for _, journal := range []string{"memory", "file:" + t.TempDir()} {
		name, _, _ := strings.Cut(journal, ":")
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testSlowSubscriberAtShutdown(t, journal)
		})
	}
}

func testSlowSubscriberAtShutdown(t *testing.T, journal string) {
	p, s := engine(t, "--journal", journal)
	stream, err := s.Client().Subscribe(t.Context(), &kvcastv1.SubscribeRequest{
		Start: &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Header(); err != nil {
		t.Fatal(err)
	}
	// 32 MiB, more than the transport buffers.
	const batches, blocks = 256, 16 << 10
	hashes := make([]uint64, blocks)
	for i := range hashes {
		hashes[i] = uint64(i)
	}
	for range batches {
		publish(t, p, wire.Event{Kind: wire.KindRemoved, BlockHashes: hashes})
	}
	s.AwaitSample(`kvcast_ingest_batches_total{worker="w"} 256`)
	began := time.Now()
	if status := s.End(); status != 0 {
		t.Errorf("exit status: got %d, want 0", status)
	}
	if took := time.Since(began); took < time.Second {
		t.Errorf("shutdown took %v: want it to wait for the subscriber, else this test has no effect", took)
	}
}

func TestLossAndRestartAreReported(t *testing.T) {
	t.Parallel()
	p, s := engine(t)
	stored := func(hash uint64) wire.Event {
		return wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{hash}, Tokens: []uint32{1, 2}, BlockSize: 2}
	}
	publish(t, p, stored(1), stored(1), stored(2))
	if _, err := p.Lose(stored(3)); err != nil {
		t.Fatal(err)
	}
	// After a gap every block has one copy, so that one remove removes the block, which was stored twice.
	publish(t, p, wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{1}})
	if err := p.Resend(0); err != nil { // a duplicate by the network
		t.Fatal(err)
	}
	publish(t, p, stored(4))
	if err := p.Restart(0); err != nil {
		t.Fatal(err)
	}
	publish(t, p, stored(5))

	got := kvcast(t, nil, "subscribe", "--addr", s.Address(), "--from", "earliest", "--count", "9")
	want := []string{"worker added", "stored", "stored", "stored", "GAP", "removed", "stored", "cleared", "stored"}
	all := got.out
	for _, w := range want {
		_, after, ok := strings.Cut(all, w)
		if !ok {
			t.Fatalf("got:\n%s\nwant in this order: %v", got.out, want)
		}
		all = after
	}
	for _, m := range []string{
		`kvcast_pipeline_gaps_total{worker="w"} 1`,
		`kvcast_index_incomplete{dp_rank="0",worker="w"} 0`, // the restart resolved it
		`kvcast_ingest_duplicates_total{worker="w"} 1`,
		`kvcast_ingest_restarts_total{worker="w"} 1`,
		`kvcast_index_blocks{dp_rank="0",tier="device",worker="w"} 1`,
		`kvcast_pipeline_raw_event_holes_total{worker="w"} 1`,
	} {
		s.AwaitSample(m)
	}
}
