package bench_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// snapshotBlocks is what the engine of BenchmarkSnapshot holds.
const snapshotBlocks = 1_000_000

// BenchmarkSnapshot is the Snapshot call of a server whose one engine holds
// 1,000,000 blocks, in prompts of 64. b.N is snapshots, one after the other.
//
// Quiet is while nothing else happens: the blocks a second, and the server's CPU
// time for each. Included: the call, copying the table, putting it in order,
// encoding and sending. Excluded: storing the blocks, and decoding. Reading CPU
// time is some 10 ms off, of the some 100 ms that a snapshot takes.
//
// Engine is while the engine goes on with 2,000 B2 batches a second and a subscriber
// follows it. max-gap is the longest time between two of its entries, max-way the
// longest from a batch's send to the subscriber, max-read that part of it up to
// when ingest had read the batch; and the same of as many batches without
// snapshots, before, which is what the machine makes of it anyhow.
//
// The check: the first snapshot is decoded and has each block once; those measured
// have as many bytes and pieces (Quiet), or at least as many bytes (Engine), and end
// with their end. For the entries it is that of BenchmarkServer.
func BenchmarkSnapshot(b *testing.B) {
	requireProc(b)
	open := func() (*snapshots, error) { return openSnapshots(snapshotBlocks) }
	benchmarkWith(b, "Quiet", open, func(b *testing.B, s *snapshots) {
		b.ResetTimer()
		f, err := s.measureQuiet(b.N)
		b.StopTimer()
		if err != nil {
			b.Fatal(err)
		}
		blocks := float64(snapshotBlocks) * float64(b.N)
		b.ReportMetric(blocks/f.elapsed.Seconds(), "blocks/s")
		b.ReportMetric(float64(f.cpu.Nanoseconds())/blocks, "server-cpu-ns/block")
		b.ReportMetric(float64(s.first.bytes)/snapshotBlocks, "B/block")
		reportAllocations(b, f.grown[metricMallocs]/float64(b.N), f.grown[metricAllocBytes]/float64(b.N))
	})
	benchmarkWith(b, "Engine", open, func(b *testing.B, s *snapshots) {
		b.ResetTimer()
		f, during, without, err := s.measureEngine(b.N)
		b.StopTimer()
		if err != nil {
			b.Fatal(err)
		}
		for suffix, t := range map[string]times{"": during, "-without": without} {
			b.ReportMetric(milliseconds(quantile(t.gaps, 1)), "max-gap-ms"+suffix)
			b.ReportMetric(milliseconds(quantile(t.ways, 1)), "max-way-ms"+suffix)
			b.ReportMetric(milliseconds(quantile(t.reads, 1)), "max-read-ms"+suffix)
		}
		reportAllocations(b, f.grown[metricMallocs]/float64(b.N), f.grown[metricAllocBytes]/float64(b.N))
	})
}

// snapshots is a rig with a client for snapshots.
type snapshots struct {
	*observed
	conn  *grpc.ClientConn
	first snapshotRead
	other *load // B2, of the same engine
}

// switchLoad lets the engine go on with the other load.
func (s *snapshots) switchLoad() {
	s.load, s.other = s.other, s.load
	s.load.held = s.other.held
}

func openSnapshots(blocks int) (*snapshots, error) {
	r, err := newRig(shape{blocks: 16, endless: true}, 0)
	if err != nil {
		return nil, err
	}
	s := &snapshots{observed: &observed{rig: r}, other: newLoad(shape{blocks: 1, endless: true})}
	if err := s.fill(blocks); err != nil {
		return nil, closeAfter(err, s)
	}
	return s, nil
}

// fill publishes the blocks, and finds out what a snapshot of them is.
func (s *snapshots) fill(blocks int) (err error) {
	if _, err := s.subscribe(s.observer.observe); err != nil {
		return err
	}
	if _, err := s.rig.measure(func() error {
		if err := s.publish(blocks / s.load.shape.blocks); err != nil {
			return err
		}
		return s.arrive()
	}); err != nil {
		return err
	}
	if s.conn, err = dial(s.server.grpc); err != nil {
		return err
	}
	held := make(map[uint64]struct{}, blocks)
	told := 0
	s.first, err = readSnapshot(context.Background(), s.conn, func(raw []byte) error {
		var m kvcastv1.SnapshotResponse
		if err := proto.Unmarshal(raw, &m); err != nil {
			return fmt.Errorf("decode snapshot: %w", err)
		}
		for _, b := range m.GetSnapshotBlocks() {
			for _, e := range b.GetEvents() {
				for _, h := range e.GetStored().GetBlockHashes() {
					held[h] = struct{}{}
					told++
				}
			}
		}
		return nil
	})
	if err == nil && (told != blocks || len(held) != blocks || s.first.end != s.newest()) {
		err = fmt.Errorf("check snapshot: %d blocks, %d of them distinct, at %d; want %d at %d", told, len(held), s.first.end, blocks, s.newest())
	}
	return err
}

// measureQuiet takes n snapshots.
func (s *snapshots) measureQuiet(n int) (figures, error) {
	return s.rig.measure(func() error {
		for range n {
			r, err := readSnapshot(context.Background(), s.conn, nil)
			if err != nil {
				return err
			}
			if r != s.first {
				return fmt.Errorf("check snapshot: got %+v, want %+v", r, s.first)
			}
		}
		return nil
	})
}

// enginePacket is the engine's batches at a time, between which it looks whether
// to end.
const enginePacket = 200

// measureEngine takes n snapshots while the engine goes on, and then lets it go on
// as long without. The figures are those of the first part.
func (s *snapshots) measureEngine(n int) (f figures, during, without times, err error) {
	s.switchLoad()
	defer s.switchLoad()
	begun := s.load.sent
	s.observer.restart()
	if f, err = s.rig.measure(func() error {
		taken := make(chan error, 1)
		go func() { taken <- s.takeSnapshots(n) }()
		for {
			if err := s.pace(enginePacket); err != nil {
				return errors.Join(err, <-taken)
			}
			select {
			case err := <-taken:
				return errors.Join(err, s.arrive())
			default:
			}
		}
	}); err != nil {
		return f, during, without, err
	}
	sent := s.load.sent - begun
	if during, err = s.observer.seen(sent); err != nil {
		return f, during, without, err
	}
	s.observer.restart()
	if _, err = s.rig.measure(func() error {
		if err := s.pace(sent); err != nil {
			return err
		}
		return s.arrive()
	}); err != nil {
		return f, during, without, err
	}
	without, err = s.observer.seen(sent)
	return f, during, without, err
}

// takeSnapshots takes n snapshots of a table that changes.
func (s *snapshots) takeSnapshots(n int) error {
	for range n {
		r, err := readSnapshot(context.Background(), s.conn, nil)
		if err != nil {
			return err
		}
		if r.bytes < s.first.bytes {
			return fmt.Errorf("check snapshot: %d bytes, want at least %d", r.bytes, s.first.bytes)
		}
	}
	return nil
}

// Close ends all parts.
func (s *snapshots) Close() error {
	var err error
	if s.conn != nil {
		err = s.conn.Close()
	}
	return errors.Join(err, s.rig.Close())
}

// TestSnapshotsAreComplete has few blocks.
func TestSnapshotsAreComplete(t *testing.T) {
	requireProc(t)
	s, err := openSnapshots(16_000)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.measureQuiet(2); err != nil {
		t.Error(err)
	}
	_, during, without, err := s.measureEngine(2)
	if err != nil {
		t.Error(err)
	}
	if len(during.ways) < enginePacket || len(without.ways) != len(during.ways) {
		t.Errorf("%d entries during snapshots, and %d without", len(during.ways), len(without.ways))
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
