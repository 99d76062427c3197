package simulator_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/test/rawzmtp"
)

func newPublisher(t *testing.T, cfg simulator.PublisherConfig) *simulator.Publisher {
	t.Helper()
	cfg.SocketConfig = withPorts(t, cfg.SocketConfig)
	p, err := simulator.NewPublisher(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func withTimeout(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	t.Cleanup(cancel)
	return ctx
}

// removal returns an event with a unique hash.
func removal(h uint64) wire.Event {
	return wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{h}}
}

// hashOf returns the argument that removal was called with.
func hashOf(t *testing.T, payload []byte) uint64 {
	t.Helper()
	return decode(t, payload).Events[0].BlockHashes[0]
}

func must(t *testing.T) func(seq uint64, err error) uint64 {
	return func(seq uint64, err error) uint64 {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return seq
	}
}

func TestPublisherInjectsFaults(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, simulator.PublisherConfig{
		SocketConfig: simulator.SocketConfig{Replay: "tcp://127.0.0.1:0"},
	})
	sub := subscribe(t, p.Endpoint())
	if err := p.WaitSubscribed(withTimeout(t), 1); err != nil {
		t.Fatal(err)
	}
	must(t)(p.Publish(removal(100)))
	must(t)(p.Drop(removal(101)))
	must(t)(p.Lose(removal(102)))
	must(t)(p.PublishUnbuffered(removal(103)))
	if seq := must(t)(p.Publish(removal(104))); seq != 4 {
		t.Errorf("Publish = seq %d, want 4", seq)
	}
	steps := []error{
		p.Resend(0),
		p.SendPayload(77, []byte{0xc1}),
		p.SendFrames([]byte("alone")),
		p.Restart(0),
	}
	must(t)(p.Publish(removal(105)))
	steps = append(steps, p.SetNextSeq(9))
	must(t)(p.Publish(removal(106)))
	if err := errors.Join(steps...); err != nil {
		t.Fatal(err)
	}
	if p.Resend(4) == nil {
		t.Error("Resend of a batch from before the restart: no error")
	}

	type got struct{ seq, hash uint64 }
	next := func() got {
		m := receiveBatch(t, sub)
		return got{m.seq, hashOf(t, m.payload)}
	}
	for _, want := range []got{{0, 100}, {3, 103}, {4, 104}, {0, 100}} {
		if g := next(); g != want {
			t.Errorf("received %+v, want %+v", g, want)
		}
	}
	if m := receiveBatch(t, sub); m.seq != 77 || len(m.payload) != 1 {
		t.Errorf("received %+v, want the unchanged payload", m)
	}
	if frames := sub.receive(t); len(frames) != 1 || string(frames[0]) != "alone" {
		t.Errorf("received %x, want the unchanged frame", frames)
	}
	for _, want := range []got{{0, 105}, {9, 106}} {
		if g := next(); g != want {
			t.Errorf("received %+v, want %+v", g, want)
		}
	}

	replayed, _, _ := replay(t, p.ReplayEndpoint(), 0)
	var seqs []uint64
	for _, m := range replayed {
		seqs = append(seqs, m.seq)
	}
	if diff := cmp.Diff([]uint64{0, 9}, seqs); diff != "" {
		t.Errorf("replay after the restart (-want +got):\n%s", diff)
	}
	if err := p.WaitReplays(withTimeout(t), 1); err != nil || p.Replays() != 1 {
		t.Errorf("Replayed: %v, Replays() = %d, want 1", err, p.Replays())
	}
}

func TestReplayReturnsLostBatches(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, simulator.PublisherConfig{
		SocketConfig: simulator.SocketConfig{Topic: "t", Replay: "tcp://127.0.0.1:*"},
	})
	for h := range uint64(5) {
		if h == 2 {
			must(t)(p.Lose(removal(h)))
			continue
		}
		must(t)(p.Drop(removal(h)))
	}
	batches, _, _ := replay(t, p.ReplayEndpoint(), 1)
	var hashes []uint64
	for _, m := range batches {
		if m.topic != "t" || m.seq != hashOf(t, m.payload) {
			t.Errorf("replayed %+v", m)
		}
		hashes = append(hashes, m.seq)
	}
	if diff := cmp.Diff([]uint64{1, 3, 4}, hashes); diff != "" {
		t.Errorf("replayed (-want +got):\n%s", diff)
	}
}

func TestMalformedRequestsForReplayGetNoAnswer(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, simulator.PublisherConfig{
		SocketConfig: simulator.SocketConfig{Replay: "tcp://127.0.0.1:*"},
	})
	must(t)(p.Publish(removal(100)))
	must(t)(p.Publish(removal(101)))
	d := newDealer(t, p.ReplayEndpoint())
	// vLLM accepts any message of three frames, including the reader's identity, as a request, and
	// a seq of any length.
	for _, frames := range [][][]byte{
		{{}}, {{}, make([]byte, 8), {}},
		{{7}, {1}}, {{}, bytes.Repeat([]byte{1}, 20)}, {{}, {}},
	} {
		d.send(frames...)
	}
	// The requests are for batches from seq 1, from a seq above all batches, and from seq 0.
	for _, want := range [][]uint64{{1}, nil, {0, 1}} {
		var got []uint64
		for {
			seq, _, end, err := wire.ParseReply(d.receive())
			if err != nil {
				t.Fatal(err)
			}
			if end {
				break
			}
			got = append(got, seq)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("replayed (-want +got):\n%s", diff)
		}
	}
	if err := p.WaitReplays(withTimeout(t), 3); err != nil {
		t.Error(err)
	}
	if p.Replays() != 3 {
		t.Errorf("%d requests answered, want 3", p.Replays())
	}
}

// TestPublisherConnectsToASubscriber covers deployments with llm-d, in which the service binds and
// engines connect.
func TestPublisherConnectsToASubscriber(t *testing.T) {
	t.Parallel()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	var publishers []*simulator.Publisher
	var subs []*rawzmtp.Conn
	for _, topic := range []string{"kv@pod-a@m", "kv@pod-b@m"} {
		p := newPublisher(t, simulator.PublisherConfig{
			SocketConfig: simulator.SocketConfig{Endpoint: "tcp://" + l.Addr().String(), Topic: topic},
		})
		sub, err := rawzmtp.Accept(l, zmtp.SUB, waitTimeout)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = sub.Close() }()
		if err := p.WaitSubscribed(withTimeout(t), 1); err != nil {
			t.Fatal(err)
		}
		publishers, subs = append(publishers, p), append(subs, sub)
	}
	seen := map[string]uint64{}
	for i, p := range publishers {
		must(t)(p.Publish(removal(uint64(i))))
		frames, err := subs[i].Receive(waitTimeout)
		if err != nil {
			t.Fatal(err)
		}
		m := batchOf(t, frames)
		seen[m.topic] = hashOf(t, m.payload)
	}
	if diff := cmp.Diff(map[string]uint64{"kv@pod-a@m": 0, "kv@pod-b@m": 1}, seen); diff != "" {
		t.Errorf("received (-want +got):\n%s", diff)
	}
}

func TestSubscriptionsAreCounted(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, simulator.PublisherConfig{})
	first, second := subscribe(t, p.Endpoint()), subscribe(t, p.Endpoint())
	if err := p.WaitSubscribed(withTimeout(t), 2); err != nil {
		t.Fatal(err)
	}
	first.close()
	second.close()
	if err := p.WaitUnsubscribed(withTimeout(t)); err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.WaitSubscribed(ended, 1); !errors.Is(err, context.Canceled) {
		t.Errorf("Subscribed with an ended context: %v", err)
	}
}

func TestClosedPublisherReturnsErrClosed(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, simulator.PublisherConfig{})
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Publish(removal(1)); !errors.Is(err, simulator.ErrClosed) {
		t.Errorf("Publish: %v, want ErrClosed", err)
	}
	if err := p.WaitSubscribed(t.Context(), 1); !errors.Is(err, simulator.ErrClosed) {
		t.Errorf("Subscribed: %v, want ErrClosed", err)
	}
}

func TestModes(t *testing.T) {
	t.Parallel()
	// No socket listens at the port: connecting succeeds, and binding uses the port.
	const endpoint = "tcp://127.0.0.1:1"
	p := newPublisher(t, simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{Endpoint: endpoint}})
	if p.Endpoint() != endpoint {
		t.Errorf("Endpoint() = %s, want %s", p.Endpoint(), endpoint)
	}
	bound := newPublisher(t, simulator.PublisherConfig{
		SocketConfig: simulator.SocketConfig{Endpoint: "tcp://127.0.0.1:0", Mode: simulator.ModeBind},
	})
	if _, err := simulator.NewPublisher(simulator.PublisherConfig{
		SocketConfig: simulator.SocketConfig{Endpoint: bound.Endpoint(), Mode: simulator.ModeBind},
	}); err == nil {
		t.Error("a port in use: no error")
	}
	ipc := "ipc://" + t.TempDir() + "/e"
	if p := newPublisher(t, simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{Endpoint: ipc}}); p.Endpoint() != ipc {
		t.Errorf("Endpoint() = %s, want %s", p.Endpoint(), ipc)
	}
	if _, err := simulator.NewPublisher(simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{Endpoint: "inproc://e"}}); err == nil {
		t.Error("bound to an endpoint of inproc")
	}
}

// TestUnknownFormIsRejected checks that no sockets are opened for an unknown form of batches.
func TestUnknownFormIsRejected(t *testing.T) {
	t.Parallel()
	for _, batch := range []simulator.BatchConfig{{BatchForm: 3}, {EventForm: 3}} {
		if p, err := simulator.NewPublisher(simulator.PublisherConfig{BatchConfig: batch}); p != nil || err == nil {
			t.Errorf("%+v: publisher %v, error %v", batch, p, err)
		}
		if e, err := simulator.New(simulator.Config{BatchConfig: batch}); e != nil || err == nil {
			t.Errorf("%+v: engine %v, error %v", batch, e, err)
		}
	}
}
