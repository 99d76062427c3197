//go:build cgo

package bench_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// snapshotBlocks is the number of blocks of BenchmarkSnapshot's engine.
const snapshotBlocks = 1_000_000

// BenchmarkSnapshot measures the Snapshot call of a server whose one engine has 1,000,000 blocks,
// in prompts of 64. b.N is consecutive snapshots.
//
// Quiet measures an otherwise idle server: blocks per second, and the server's CPU time per block.
// Included: the call, copying and sorting the table, encoding and sending. Excluded: storing the
// blocks, and decoding. A reading of CPU time has an error of about 10 ms; a snapshot uses about
// 100 ms.
//
// Engine measures while the engine publishes 2,000 B2 batches per second and a subscriber follows
// the stream. max-gap is the longest time between two entries, max-way the longest time from the
// send of a batch to its arrival at the subscriber, and max-read the part of max-way until ingest
// has read the batch. The same figures without snapshots are the baseline of the machine.
//
// Check: the first snapshot is decoded and has each block once; the measured snapshots have the same
// size and number of pieces (Quiet), or at least the same size (Engine), and end with SnapshotEnd.
// Entries are checked as in BenchmarkServer.
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
			b.ReportMetric(milliseconds(quantile(t.latencies, 1)), "max-way-ms"+suffix)
			b.ReportMetric(milliseconds(quantile(t.reads, 1)), "max-read-ms"+suffix)
		}
		reportAllocations(b, f.grown[metricMallocs]/float64(b.N), f.grown[metricAllocBytes]/float64(b.N))
	})
}

// snapshots is a rig with a client that requests snapshots.
type snapshots struct {
	*observed
	conn  *grpc.ClientConn
	first snapshotRead
	other *load // B2, of the same engine
}

// switchLoad makes the engine continue with the other load.
func (s *snapshots) switchLoad() {
	s.load, s.other = s.other, s.load
	s.load.present = s.other.present
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

// fill publishes the blocks, and determines the size of a snapshot of them.
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
	distinct := make(map[uint64]struct{}, blocks)
	decoded := 0
	s.first, err = readSnapshot(context.Background(), s.conn, func(raw []byte) error {
		var m kvcastv1.SnapshotResponse
		if err := proto.Unmarshal(raw, &m); err != nil {
			return fmt.Errorf("decode snapshot: %w", err)
		}
		for _, b := range m.GetSnapshotBlocks() {
			for _, e := range b.GetEvents() {
				for _, h := range e.GetStored().GetBlockHashes() {
					distinct[h] = struct{}{}
					decoded++
				}
			}
		}
		return nil
	})
	if err == nil && (decoded != blocks || len(distinct) != blocks || s.first.end != s.newest()) {
		err = fmt.Errorf("check snapshot: %d blocks, %d of them distinct, at %d; want %d at %d", decoded, len(distinct), s.first.end, blocks, s.newest())
	}
	return err
}

// measureQuiet requests n snapshots.
func (s *snapshots) measureQuiet(n int) (figures, error) {
	elapsed := time.Duration(0)
	f, err := s.rig.measure(func() error {
		for range n {
			<-time.After(unshared)
			start := time.Now()
			r, err := readSnapshot(context.Background(), s.conn, nil)
			if err != nil {
				return err
			}
			elapsed += time.Since(start)
			if r != s.first {
				return fmt.Errorf("check snapshot: got %+v, want %+v", r, s.first)
			}
		}
		return nil
	})
	f.elapsed = elapsed
	return f, err
}

// unshared is a time after which a snapshot does not share the pass over the index with the one before: they do within a second.
const unshared = 1500 * time.Millisecond

// enginePacket is the number of batches that the engine sends between two checks for the end.
const enginePacket = 200

// measureEngine requests n snapshots while the engine publishes, and then publishes for the same time
// without snapshots. It returns the figures of the first part.
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

// takeSnapshots requests n snapshots of a changing table.
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

// Close closes all parts.
func (s *snapshots) Close() error {
	var err error
	if s.conn != nil {
		err = s.conn.Close()
	}
	return errors.Join(err, s.rig.Close())
}

// TestSnapshotsAreComplete runs with few blocks.
func TestSnapshotsAreComplete(t *testing.T) {
	testclass.Process(t)
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
	if len(during.latencies) < enginePacket || len(without.latencies) != len(during.latencies) {
		t.Errorf("%d entries during snapshots, and %d without", len(during.latencies), len(without.latencies))
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
