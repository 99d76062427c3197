package simulator_test

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/simulator/blockpool/pooltest"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/native"
	"github.com/kvcast/kvcast/internal/wire"
)

// snapshotOf requests a snapshot, and returns its frames without the delimiter.
func snapshotOf(t *testing.T, endpoint string) (frames [][]byte) {
	t.Helper()
	n := native.New(native.Config{})
	r := transport.NewRequests(n, waitTimeout, nil, prometheus.NewGaugeVec(prometheus.GaugeOpts{}, []string{"state"}))
	r.Frames = n
	q := transport.SnapshotRequest{Endpoint: endpoint, Frames: [][]byte{nil, []byte("snapshot")}}
	if err := r.Snapshot(withTimeout(t), q, func(frame []byte, more bool) (bool, error) {
		frames = append(frames, append([]byte(nil), frame...))
		return !more, nil
	}); err != nil {
		t.Fatal(err)
	}
	return frames[1:]
}

func TestSnapshotHasTheCache(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{Snapshot: "tcp://127.0.0.1:*"}})
	if got := snapshotOf(t, p.SnapshotEndpoint()); int64(binary.BigEndian.Uint64(got[0])) != -1 {
		t.Errorf("seq %x before the first batch, want -1", got[0])
	}
	pool, err := blockpool.New(blockpool.Config{Capacity: 30, BlockSize: 4})
	if err != nil {
		t.Fatal(err)
	}
	random := rand.New(rand.NewPCG(1, 1))
	for seq := uint64(0); seq < 200; {
		prompt := make([]uint32, 4*(1+random.IntN(3)))
		for i := range prompt {
			prompt[i] = uint32(random.IntN(3))
		}
		events, ok := pool.Request(prompt)
		if !ok || len(events) == 0 {
			continue
		}
		if got := must(t)(p.Publish(events...)); got != seq {
			t.Fatalf("seq %d, want %d", got, seq)
		}
		seq++
	}
	frames := snapshotOf(t, p.SnapshotEndpoint())
	if seq := binary.BigEndian.Uint64(frames[0]); seq != 199 {
		t.Errorf("seq %d, want 199", seq)
	}
	replica := pooltest.NewReplica()
	for _, payload := range frames[2:] {
		b := decode(t, payload)
		if string(b.PublisherID) != string(frames[1]) {
			t.Error("a batch has another publisher id")
		}
		replica.Apply(t, b.Events)
	}
	replica.Check(t, pool)

	if err := p.Restart(0); err != nil {
		t.Fatal(err)
	}
	must(t)(p.Publish(removal(1)))
	restarted := snapshotOf(t, p.SnapshotEndpoint())
	if len(restarted) != 2 || string(restarted[1]) == string(frames[1]) {
		t.Errorf("got %d frames after a restart, with the same publisher id: %v", len(restarted), string(restarted[1]) == string(frames[1]))
	}
}

// A snapshot stores evicted ancestors, and removes them at its end.
func TestSnapshotHasEvictedAncestors(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{Snapshot: "tcp://127.0.0.1:*"}})
	store := wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{1, 2, 3}, BlockSize: 1, Tokens: []uint32{7, 8, 9}}
	must(t)(p.Publish(store))
	must(t)(p.Publish(removal(1), removal(3)))
	frames := snapshotOf(t, p.SnapshotEndpoint())
	events := decode(t, frames[2]).Events
	if len(events) != 3 || events[0].BlockHashes[0] != 1 || events[1].BlockHashes[0] != 2 || events[1].Parent != 1 ||
		events[2].Kind != wire.KindRemoved || events[2].BlockHashes[0] != 1 {
		t.Errorf("got %+v, want stores of 1 and 2, and a remove of 1", events)
	}
}

// A snapshot of SGLang's form has a barrier before it, and the hashes of the cached blocks.
func TestSGLangSnapshotHasTheHashes(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{
		Snapshot: "tcp://127.0.0.1:*", SnapshotForm: simulator.SnapshotSGLang, Topic: "t",
	}})
	sub := subscribe(t, p.Endpoint())
	if err := p.WaitSubscribed(withTimeout(t), 1); err != nil {
		t.Fatal(err)
	}
	must(t)(p.Publish(wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{1, 2, 3}, BlockSize: 1, Tokens: []uint32{7, 8, 9}}))
	must(t)(p.Publish(removal(3)))
	n := native.New(native.Config{})
	r := transport.NewRequests(n, waitTimeout, nil, prometheus.NewGaugeVec(prometheus.GaugeOpts{}, []string{"state"}))
	r.Frames = n
	var reader wire.SGLangSnapshot
	var header wire.SnapshotPart
	var hashes []uint64
	q := transport.SnapshotRequest{Endpoint: p.SnapshotEndpoint(), Frames: reader.Request()}
	if err := r.Snapshot(withTimeout(t), q, func(frame []byte, more bool) (bool, error) {
		part, err := reader.Next(frame, more)
		switch part.Kind {
		case wire.SnapshotHeader:
			header = part
			header.Epoch = append([]byte(nil), part.Epoch...)
		case wire.SnapshotRecords:
			var d wire.Decoder
			b, err := d.DecodeRecords(part.Payload)
			if err != nil {
				return false, err
			}
			for _, e := range b.Events {
				hashes = append(hashes, e.BlockHashes...)
				if e.HasParent && e.Parent != e.BlockHashes[0]-1 {
					t.Errorf("block %d after %d", e.BlockHashes[0], e.Parent)
				}
			}
		default:
		}
		return part.End, err
	}); err != nil {
		t.Fatal(err)
	}
	if header.Seq != 2 || !slices.Equal(hashes, []uint64{1, 2}) {
		t.Errorf("snapshot of %v up to %d, want [1 2] up to 2", hashes, header.Seq)
	}
	for seq := range uint64(3) {
		topic, epoch := wire.CutTopic(sub.receive(t)[0])
		if string(topic) != "t" || string(epoch) != string(header.Epoch) {
			t.Errorf("batch %d: topic %q, epoch %q, want epoch %q", seq, topic, epoch, header.Epoch)
		}
	}
}
