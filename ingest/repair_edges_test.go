package ingest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvcast/kvcast/internal/zmqio"
)

// An engine that answered a look-back with nothing may restart while the same repair
// goes on: the next request that brings nothing looks back again.
func TestRestartAfterAnUnansweredLookBackIsRecognised(t *testing.T) {
	s := newScript(t)
	s.begin("", 9)
	s.connect()
	s.live("", 0, 12) // 10 and 11 are missing
	s.askNone(nil)
	s.askNone(nil) // the look-back
	s.want("gap possible_restart 0-0")
	// The engine restarts, which the live connection shows late.
	s.ask(1, 0, 3, nil)
	s.ask(1, 0, 3, nil) // looks back again
	s.want("restarted")
	s.connect()
	s.finish(1, 3)
	s.want("batch 0 of 1", "batch 1 of 1", "batch 2 of 1", "batch 3 of 1")
}

// A gap that shows while a silent engine is probed is repaired like any other, although
// the probe itself was not answered.
func TestGapNoticedDuringAProbeIsRepaired(t *testing.T) {
	s := newScript(t)
	s.begin("", 9)
	s.p.fetch(s.now, causeProbe)
	s.live("", 0, 12)
	if !s.askNone(errReplaySilent) {
		t.Fatal("given up after one unanswered request")
	}
	s.finish(0, 12)
	s.want("batch 10 of 0", "batch 11 of 0", "batch 12 of 0")
}

// A batch that continues where the last one left off needs no repair, whether or not
// the probe under way is answered.
func TestBatchInOrderDuringAProbeIsDelivered(t *testing.T) {
	s := newScript(t)
	s.begin("", 9)
	s.p.fetch(s.now, causeProbe)
	s.live("", 0, 10)
	if s.askNone(errReplaySilent) {
		t.Fatal("asked again, though nothing is missing")
	}
	s.want("batch 10 of 0")
}

func epochTopic(epoch int) string { return fmt.Sprintf("kv\x00sgl-kv-epoch=%x", epoch) }

// A live batch with another epoch than the engine's is a restart, whatever the seqs and
// the replay say.
func TestNewEpochIsARestart(t *testing.T) {
	t.Run("whose replay begins above the last seq", func(t *testing.T) {
		s := newScript(t)
		s.begin(epochTopic(1), 9)
		s.connect()
		s.ask(1, 100, 104, nil) // twice the same: the engine seems to have forgotten the rest
		s.ask(1, 100, 104, nil)
		if s.asked != nil {
			t.Fatal("still asking")
		}
		s.lines = nil
		s.live(epochTopic(2), 1, 105)
		for s.asked != nil {
			s.ask(1, 100, 105, nil)
		}
		s.want("restarted", "gap replay_forgotten 0-99", "batch 100 of 1", "batch 101 of 1", "batch 102 of 1",
			"batch 103 of 1", "batch 104 of 1", "batch 105 of 1")
		for seq := uint64(106); seq < 110; seq++ {
			s.live(epochTopic(2), 1, seq)
			if s.asked != nil {
				t.Fatalf("batch %d of the adopted epoch costs a replay", seq)
			}
		}
	})
	t.Run("that continues the seqs", func(t *testing.T) {
		s := newScript(t)
		s.begin(epochTopic(1), 9)
		s.live(epochTopic(2), 1, 10)
		s.finish(1, 10)
		if s.lines[0] != "restarted" || len(s.lines) != 12 {
			t.Errorf("lane got %q, want a restart and batches 0 to 10", s.lines)
		}
	})
	t.Run("during a repair", func(t *testing.T) {
		s := newScript(t)
		s.begin(epochTopic(1), 9)
		s.live(epochTopic(1), 0, 11) // 10 is missing
		first := s.asked
		s.connect()
		s.live(epochTopic(2), 1, 2)
		if s.asked == first {
			t.Fatal("the repair of the former incarnation goes on")
		}
		s.finish(1, 2)
		s.want("restarted", "batch 0 of 1", "batch 1 of 1", "batch 2 of 1")
	})
	t.Run("but not a late batch of the former one", func(t *testing.T) {
		s := newScript(t)
		s.begin(epochTopic(1), 9)
		s.connect()
		s.live(epochTopic(2), 1, 0)
		s.finish(1, 0)
		s.lines = nil
		s.live(epochTopic(1), 0, 9)
		if s.asked != nil || len(s.lines) > 0 {
			t.Errorf("asked %+v, lane got %q, want nothing", s.asked, s.lines)
		}
		s.live(epochTopic(2), 1, 1)
		s.want("batch 1 of 1")
	})
	t.Run("but two that alternate are two publishers", func(t *testing.T) {
		s := newScript(t)
		s.begin(epochTopic(1), 9)
		s.live(epochTopic(2), 1, 0)
		s.finish(1, 0)
		s.lines = nil
		s.live(epochTopic(1), 0, 10)
		if s.asked != nil {
			t.Errorf("asked %+v", s.asked)
		}
		s.want("gap ambiguous_publisher 0-0", "batch 10 of 0")
	})
}

func publisherMessage(id byte, seq, hash uint64) *zmqio.Message {
	m := testMessage("", seq, hash)
	m.Frames[2][0] += 2 // an array of four: no dp rank, and the publisher id
	m.Frames[2] = msgp.AppendNil(m.Frames[2])
	m.Frames[2] = msgp.AppendBytes(m.Frames[2], bytes.Repeat([]byte{id}, 16))
	return m
}

// A batch with another publisher id is of another incarnation, live and replayed.
func TestNewPublisherIDIsARestart(t *testing.T) {
	s := newScript(t)
	s.connect()
	s.p.messageAt(s.in, s.now, publisherMessage(1, 0, blockOf(0, 0)))
	reply := func(id byte, incarnation, seq uint64) bool {
		a := newArrival(&s.in.decoder, nil, seq, publisherMessage(id, seq, blockOf(incarnation, seq)).Frames[2])
		a.replayed = true
		return s.p.replayed(s.in, s.now, s.asked, &a)
	}
	s.p.ask(s.asked)
	reply(1, 0, 0)
	s.end(s.asked, nil)
	s.want("batch 0 of 0")

	s.p.messageAt(s.in, s.now, publisherMessage(2, 1, blockOf(1, 1))) // continues the seqs
	s.want("restarted")
	s.p.ask(s.asked)
	reply(2, 1, 0)
	reply(2, 1, 1)
	s.end(s.asked, nil)
	s.want("batch 0 of 1", "batch 1 of 1")

	s.connect()
	s.p.ask(s.asked)
	if reply(3, 2, 1) {
		t.Fatal("more batches of a replay by another publisher are wanted")
	}
	s.end(s.asked, nil)
	s.want("restarted")
}

func heartbeat(id byte, seq uint64) *zmqio.Message {
	p := msgp.AppendArrayHeader(nil, 4)
	p = msgp.AppendFloat64(p, 1_700_000_001)
	p = msgp.AppendArrayHeader(p, 0)
	p = msgp.AppendNil(p)
	p = msgp.AppendBytes(p, bytes.Repeat([]byte{id}, 16))
	return &zmqio.Message{Frames: [][]byte{nil, binary.BigEndian.AppendUint64(nil, seq), p}, Count: messageFrames}
}

// A publisher that is idle may repeat its last seq in a batch without events.
func TestHeartbeatIsNotARestart(t *testing.T) {
	s := newScript(t)
	s.p.replay = ""
	s.connect()
	s.p.messageAt(s.in, s.now, publisherMessage(1, 0, blockOf(0, 0)))
	s.p.messageAt(s.in, s.now, heartbeat(1, 0))
	s.p.messageAt(s.in, s.now, heartbeat(1, 0))
	s.p.messageAt(s.in, s.now, publisherMessage(1, 1, blockOf(0, 1)))
	s.want("batch 0 of 0", "batch 1 of 0")
	s.p.messageAt(s.in, s.now, heartbeat(2, 1))
	if s.lines[0] != "restarted" {
		t.Errorf("lane got %q, want a restart at the heartbeat of another publisher", s.lines)
	}
}

// Heartbeats that are held back behind a repair are not batches either.
func TestHeartbeatBehindARepairIsNotARestart(t *testing.T) {
	s := newScript(t)
	s.connect()
	s.p.messageAt(s.in, s.now, publisherMessage(1, 10, blockOf(0, 10)))
	s.p.messageAt(s.in, s.now, heartbeat(1, 10))
	s.p.messageAt(s.in, s.now, publisherMessage(1, 11, blockOf(0, 11)))
	s.p.messageAt(s.in, s.now, heartbeat(1, 11))
	for n := 0; s.asked != nil; n++ {
		if n > 20 {
			t.Fatal("still asking")
		}
		s.askNone(errReplaySilent)
	}
	s.want("gap joined_late 0-9", "batch 10 of 0", "batch 11 of 0")
}

// A repair that an other one follows is ended: what it waits for is not waited for
// any longer.
func TestEachRestartEndsTheRepairBefore(t *testing.T) {
	s := newScript(t)
	running := 0
	s.p.worker.fetch = func(_ *publisher, r *repair) {
		running++
		r.cancel = func() { running-- }
	}
	s.connect()
	for i := range 100 {
		s.p.messageAt(s.in, s.now, publisherMessage(byte(i), 1, blockOf(uint64(i), 1)))
		if running > 1 {
			t.Fatalf("%d repairs are running after %d restarts", running, i)
		}
	}
	s.p.stop()
	if running != 0 {
		t.Errorf("%d repairs are running after the end", running)
	}
}

// A replay socket that nobody can name any longer leaves nothing waiting.
func TestReplaySocketThatIsGoneEndsTheRepair(t *testing.T) {
	s := newScript(t)
	s.begin("", 3)
	s.live("", 0, 6)
	s.p.replay = ""
	s.live("", 0, 7)
	s.end(s.asked, errReplaySilent)
	if s.asked != nil || s.p.repair != nil {
		t.Fatalf("still repairs: %+v", s.p.repair)
	}
	s.want("gap replay_unavailable 4-5", "batch 6 of 0", "batch 7 of 0")
}

// An ask whose replies did not fit is not taken for all that the engine has.
func TestOverrunReplayIsNotComplete(t *testing.T) {
	s := newScript(t)
	s.begin("", 3)
	s.connect()
	if again := s.ask(0, 0, 3, errReplayOverrun); !again {
		t.Error("nothing more is asked for")
	}
}
