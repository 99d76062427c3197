package ingest

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/feed"
)

// script drives one publisher with a replay socket step by step, and records what its
// lane gets. Block hashes name the incarnation and the seq of the batch.
type script struct {
	t   *testing.T
	p   *publisher
	in  *intake
	now time.Time
	// asked is the repair under way; nil where none is.
	asked *repair
	lines []string
}

func newScript(t *testing.T) *script {
	s := &script{t: t, now: testTime}
	s.p, s.in = newTestPublisher(s)
	s.p.replay, s.p.replayAnswered = "tcp://engine", true
	s.p.worker.fetch = func(_ *publisher, r *repair) { s.asked = r }
	return s
}

func (s *script) Batch(b *feed.Batch) {
	if len(b.Events) == 0 {
		s.lines = append(s.lines, fmt.Sprintf("batch %d, empty", b.Seq))
		return
	}
	hash := b.Events[0].BlockHashes[0]
	s.lines = append(s.lines, fmt.Sprintf("batch %d of %d", b.Seq, hash>>32))
}

func (s *script) Gap(g feed.Gap) {
	s.lines = append(s.lines, fmt.Sprintf("gap %v %d-%d", g.Reason, g.FirstSeq, g.LastSeq))
}

func (s *script) Restarted(feed.Restart) { s.lines = append(s.lines, "restarted") }

func (s *script) connect() {
	if s.p.connected {
		s.p.disconnect()
	}
	s.p.connect(s.now)
}

// live delivers a live batch of an incarnation under a topic.
func (s *script) live(topic string, incarnation, seq uint64) {
	s.p.messageAt(s.in, s.now, testMessage(topic, seq, blockOf(incarnation, seq)))
}

// ask answers one request with the batches from first to last of an incarnation that
// are not before the seq asked for, and reports whether another request follows.
func (s *script) ask(incarnation, first, last uint64, err error) (again bool) {
	s.t.Helper()
	from, ok := s.p.ask(s.asked)
	if !ok {
		s.t.Fatal("nothing is asked for")
	}
	asked := s.asked
	for seq := max(from, first); seq <= last; seq++ {
		a := newArrival(&s.in.decoder, nil, seq, testMessage("", seq, blockOf(incarnation, seq)).Frames[2])
		a.replayed = true
		if !s.p.replayed(s.in, s.now, asked, &a) {
			break
		}
	}
	s.now = s.now.Add(time.Second)
	return s.end(asked, err)
}

// askNone answers one request with no batches.
func (s *script) askNone(err error) (again bool) {
	s.t.Helper()
	if _, ok := s.p.ask(s.asked); !ok {
		s.t.Fatal("nothing is asked for")
	}
	s.now = s.now.Add(time.Second)
	return s.end(s.asked, err)
}

func (s *script) end(asked *repair, err error) (again bool) {
	_, again = s.p.asked(s.in, s.now, asked, err)
	if !again && s.asked == asked {
		s.asked = nil
	}
	return again
}

// finish answers requests with all batches of an incarnation until none follows.
func (s *script) finish(incarnation, last uint64) (requests int) {
	s.t.Helper()
	for s.asked != nil {
		if requests++; requests > 20 {
			s.t.Fatalf("still asking: %+v", s.asked)
		}
		s.ask(incarnation, 0, last, nil)
	}
	return requests
}

// want compares what the lane got since the last call.
func (s *script) want(lines ...string) {
	s.t.Helper()
	if d := cmp.Diff(lines, s.lines); d != "" {
		s.t.Fatalf("lane (-want +got):\n%s", d)
	}
	s.lines = nil
}

// begin reads batches 0 to last of incarnation 0.
func (s *script) begin(topic string, last uint64) {
	s.t.Helper()
	s.connect()
	s.live(topic, 0, last)
	s.finish(0, last)
	if s.p.state != SourceLive || len(s.lines) != int(last)+1 {
		s.t.Fatalf("state %v after %v", s.p.state, s.lines)
	}
	s.lines = nil
}
