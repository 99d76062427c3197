package hostile_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/rawzmtp"
)

// largeBatch is the length of batches that are as large as a message may be, but for its frames.
const largeBatch = 8<<20 - 1<<10

// largeBatches are batches that take many times their length when they are decoded or processed.
var largeBatches = map[string]func() []byte{
	"empty maps": func() []byte { return batchOfEvents(largeBatch, "\x80") },
	"stores with all fields": func() []byte {
		return batchOfEvents(wire.MaxEvents, "\x9d\xabBlockStored\x90\xc0\x90\x00\xc0\xc0\xc0\x90\x90\xc0\xc0\x00")
	},
	"stores of a block": func() []byte {
		b := msgp.AppendArrayHeader([]byte("\x92\x01"), wire.MaxEvents)
		for k := range uint32(wire.MaxEvents) {
			b = append(b, "\x95\xabBlockStored\x91"...)
			b = append(msgp.AppendUint32(b, 1<<16+k), "\xc0\x91\x00\x01"...)
		}
		return b
	},
	"hashes that differ": func() []byte {
		b := append([]byte("\x92\x01\x91\x92"), "\xacBlockRemoved"...)
		b = msgp.AppendArrayHeader(b, wire.MaxBlocks)
		for k := range uint32(wire.MaxBlocks) {
			b = msgp.AppendUint32(b, 1<<16+k)
		}
		return b
	},
	"blocks of a token": func() []byte {
		const blocks = wire.MaxBlocks - 1
		b := append([]byte("\x92\x01\x91\x95"), "\xabBlockStored"...)
		b = msgp.AppendArrayHeader(b, blocks)
		for k := range uint32(blocks) {
			b = msgp.AppendUint32(b, 1<<16+k)
		}
		b = msgp.AppendArrayHeader(append(b, 0xc0), blocks)
		return append(append(b, make([]byte, blocks)...), 1)
	},
	"a hash that repeats at the end": func() []byte {
		b := append([]byte("\x92\x01\x91\x95"), "\xabBlockStored"...)
		b = msgp.AppendArrayHeader(b, wire.MaxBlocks)
		for k := range uint32(wire.MaxBlocks) {
			b = msgp.AppendUint32(b, 1<<16+k%(wire.MaxBlocks-1))
		}
		b = msgp.AppendArrayHeader(append(b, 0xc0), wire.MaxBlocks)
		return append(append(b, make([]byte, wire.MaxBlocks)...), 1)
	},
	"tokens": func() []byte {
		b := append([]byte("\x92\x01\x91\x95"), "\xabBlockStored\x91\x01\xc0"...)
		return append(msgp.AppendArrayHeader(b, largeBatch-64), append(make([]byte, largeBatch-64), 1)...)
	},
}

// batchOfEvents is a batch of n equal events.
func batchOfEvents(n int, event string) []byte {
	return append(msgp.AppendArrayHeader([]byte("\x92\x01"), uint32(n)), bytes.Repeat([]byte(event), n)...)
}

const (
	// memoryLimit is the soft limit of a container with 512 MiB, mostResident what a server with a million blocks may need under any input.
	memoryLimit  = 460
	mostResident = 512 + 64
	filledBlocks = 1_000_000
	attackers    = 16
	// mostKept is how much of the memory of an attack may be kept soon afterwards: the entries of the journal are some of it.
	mostKept = 128
)

// TestLargeBatchesStayWithinMemory has peers of four addresses send batches that take as much memory as a batch can, to a server that has a
// million blocks. They may not use up the blocks either. It must neither exceed the memory of its container, nor keep it afterwards. libzmq receives without such a bound.
func TestLargeBatchesStayWithinMemory(t *testing.T) {
	testclass.Process(t)
	testclass.WithoutRace(t) // it measures memory
	t.Setenv("GOMEMLIMIT", fmt.Sprintf("%dMiB", memoryLimit))
	port := harness.FreePort(t)
	s := harness.Serve(t, harness.ProcessConfig{Args: []string{
		"--bind", fmt.Sprintf("tcp://127.0.0.1:*,replay_port=%d", port), "--ingest-listen-transport", "native", "--ingest-connect-transport", "native",
		"--ingest-grace", "1s", // workers of attackers leave
		"--ingest-max-blocks", fmt.Sprint(filledBlocks * 6 / 5), // of which attackers leave some
	}})
	h := newHonestAt(t, s, s.Client(), port)
	h.round()
	fill(t, s)
	h.round()
	before := s.ResidentMiB()
	during := func(attack func(*testing.T, context.Context, *harness.Server), metric string) {
		t.Helper()
		most := s.Sum(metric) + 2*attackers
		h.beside(t, s, mostResident, trial{
			attack: func(ctx context.Context, _ func()) { attack(t, ctx, s) }, begun: func(m harness.Metrics) bool { return m.Sum(metric) >= most },
		})
	}
	batches := make(map[string][]byte)
	for name, batch := range largeBatches {
		batches[name] = batch()
	}
	for _, name := range slices.Sorted(maps.Keys(batches)) {
		t.Run(name, func(*testing.T) {
			during(func(t *testing.T, ctx context.Context, s *harness.Server) {
				var group sync.WaitGroup
				for i := range attackers {
					group.Go(func() { sendBatches(ctx, t, s, net.IPv4(127, 0, 3, byte(i%4)), i%2, batches[name]) })
				}
				group.Wait()
			}, "kvcast_ingest_messages_total")
		})
	}
	t.Run("replays", func(*testing.T) {
		during(func(t *testing.T, ctx context.Context, s *harness.Server) {
			replay(ctx, t, s, net.IPv4(127, 0, 3, 5), port, attackers, batches["stores with all fields"], 0)
		}, "kvcast_ingest_replayed_batches_total")
	})
	if got := s.Sum("kvcast_index_blocks"); got < filledBlocks {
		t.Errorf("%g blocks, want %d", got, filledBlocks)
	}
	h.round()
	peak := s.PeakResidentMiB()
	t.Logf("%d MiB resident before the attacks, %d at most, %d after", before, peak, s.ResidentMiB())
	if peak > mostResident {
		t.Errorf("%d MiB resident at most, want %d", peak, mostResident)
	}
	harness.WaitFor(t, func() bool { return s.ResidentMiB() < before+mostKept })
}

// fill has an engine without a replay socket store a million blocks.
func fill(t *testing.T, s *harness.Server) {
	t.Helper()
	const blocks, size = 250, 16
	c, err := rawzmtp.DialFrom(t.Context(), net.IPv4(127, 0, 3, 9), zmtp.PUB, strings.TrimPrefix(s.Endpoint(), "tcp://"), harness.Timeout)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	ev := wire.Event{Kind: wire.KindStored, BlockSize: size, BlockHashes: make([]uint64, blocks), Tokens: make([]uint32, blocks*size)}
	var e wire.Encoder
	for seq := range uint64(filledBlocks / blocks) {
		for k := range ev.BlockHashes {
			ev.BlockHashes[k] = 1<<40 + seq*blocks + uint64(k)
			ev.Tokens[k*size] = uint32(seq*blocks) + uint32(k)
		}
		batch := wire.Batch{Time: 1, HasTime: true, Events: []wire.Event{ev}}
		c.Message([]byte("kv@192.0.2.100@m"), binary.BigEndian.AppendUint64(nil, seq), e.AppendBatch(nil, &batch))
		if err := c.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	go func() {
		for {
			if _, err := c.Receive(harness.Timeout); err != nil { // it answers PINGs
				return
			}
		}
	}()
	s.AwaitSample(fmt.Sprintf(`kvcast_index_blocks{dp_rank="0",tier="device",worker="192.0.2.100"} %g`, float64(filledBlocks)))
}

// sendBatches connects from an address again and again until the context is done, and sends the same batch as fast as it is read.
func sendBatches(ctx context.Context, t *testing.T, s *harness.Server, from net.IP, engine int, batch []byte) {
	topic := fmt.Appendf(nil, "kv@192.0.2.%d@m", engine)
	for seq := uint64(0); ctx.Err() == nil; {
		c, err := rawzmtp.DialFrom(ctx, from, zmtp.PUB, strings.TrimPrefix(s.Endpoint(), "tcp://"), harness.Timeout)
		if err != nil {
			if ctx.Err() == nil {
				t.Error(err)
			}
			return
		}
		stop := context.AfterFunc(ctx, func() { _ = c.Close() })
		for ctx.Err() == nil {
			c.Message(topic, binary.BigEndian.AppendUint64(nil, seq), batch)
			seq++
			if c.Flush() != nil { // it is disconnected
				break
			}
		}
		stop()
		_ = c.Close()
	}
}
