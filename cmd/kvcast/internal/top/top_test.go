package top

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"
	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/output"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// sampled returns a server's state some seconds after the start of 2026. Each worker has
// published rate batches a second, and the subscriber is not behind.
func sampled(second int, epoch string, rates ...uint64) *sample {
	at := time.Date(2026, 1, 1, 0, 0, second, 0, time.Local)
	s := &sample{at: at, status: &kvcastv1.GetStatusResponse{Epoch: epoch, OldestSeq: 1, NewestSeq: 1000 * uint64(second), Blocks: 1234567, Version: "v1", JournalBytes: 3 << 19}}
	for i, rate := range rates {
		w := &kvcastv1.WorkerStatus{Name: fmt.Sprintf("w%d", i), Model: "m", State: kvcastv1.WorkerState_WORKER_STATE_LIVE,
			Ranks: []*kvcastv1.RankStatus{{DpRank: 0, Blocks: []*kvcastv1.TierBlocks{{Tier: kvcastv1.Tier_TIER_DEVICE, Blocks: 10 + uint64(i)}}}},
			Sources: []*kvcastv1.SourceStatus{{
				Endpoint: "tcp://e", State: kvcastv1.SourceState_SOURCE_STATE_LIVE, Started: true, LastSeq: rate * uint64(second),
				ReplayState: kvcastv1.ReplayState_REPLAY_STATE_ANSWERS,
			}},
		}
		if i == 1 {
			w.State = kvcastv1.WorkerState_WORKER_STATE_DEGRADED
			w.Sources[0].State = kvcastv1.SourceState_SOURCE_STATE_REPAIRING
			w.Ranks[0].Gaps, w.Ranks[0].MissedBatches, w.Ranks[0].Incomplete = 2, 9, true
			w.Ranks[0].Blocks = append(w.Ranks[0].Blocks, &kvcastv1.TierBlocks{Tier: kvcastv1.Tier_TIER_DISK, Blocks: 1 << 20})
		}
		s.workers = append(s.workers, w)
	}
	s.subscribers = []*kvcastv1.SubscriberStatus{{
		Peer: "10.0.0.1:7", UserAgent: "grpc-go/1 more", StartTimeUnixNano: at.Add(-time.Duration(second+59) * time.Second).UnixNano(),
		Seq: 1000*uint64(second) - 5, Behind: 5, Filter: &kvcastv1.Filter{Workers: []string{"w1"}, Tiers: []kvcastv1.Tier{kvcastv1.Tier_TIER_DISK}},
	}}
	return s
}

// updated returns a screen after it has processed messages.
func updated(s screen, messages ...tea.Msg) screen {
	for _, m := range messages {
		next, _ := s.Update(m)
		s = next.(screen)
	}
	return s
}

func key(text string) tea.KeyPressMsg {
	if text == "down" {
		return tea.KeyPressMsg{Code: tea.KeyDown}
	}
	return tea.KeyPressMsg{Code: []rune(text)[0], Text: text}
}

func TestScreen(t *testing.T) {
	s := updated(screen{addr: "h:1"}, polled{sample: sampled(1, "e", 3, 50)}, polled{sample: sampled(3, "e", 3, 50)})
	want := `00:00:03 · h:1 v1 · seq 3,000, 1,000/s · retains 3,000, 1.5 MiB · epoch e
2 workers (1 live, 1 degraded) · 1,234,567 blocks · 1 subscriber

WORKER  MODEL  STATE     RANK  SOURCE     REPLAY   BATCHES/S  DEVICE       DISK  GAPS
w0      m      live         0  live       answers        3.0      10          0  0
w1      m      degraded     0  repairing  answers         50      11  1,048,576  2 (9 batches) INCOMPLETE

SUBSCRIBER  CLIENT      FOR    SEQ  BEHIND  ENTRIES/S  FILTER
10.0.0.1:7  grpc-go/1  1m2s  2,995       5      1,000  --worker w1 --tier disk

w1 rank 0: repairing: the replay of tcp://e is being read; wait`
	if diff := cmp.Diff(want, s.text()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	t.Setenv("CLICOLOR_FORCE", "1")
	s.Styler = output.NewStyler(io.Discard)
	if painted := s.text(); painted == want || ansi.Strip(painted) != want {
		t.Errorf("in colours: got %q", painted)
	}
}

func TestScreenOfACluster(t *testing.T) {
	const second = 3
	sample := sampled(second, "e", 3, 50)
	sample.workers[0].Owner = &kvcastv1.WorkerOwner{InstanceId: "ABCDEFGHIJ"}
	sample.workers[1].Owner = &kvcastv1.WorkerOwner{InstanceId: "KLMNOPQRST", HandedOver: true}
	started := sample.at.Add(-time.Hour).UnixNano()
	sample.status.InstanceId = "ABCDEFGHIJ"
	sample.status.Instances = []*kvcastv1.InstanceStatus{
		{Id: "ABCDEFGHIJ", Host: "h1", Pid: 7, GrpcAddress: ":50051", Version: "v1", StartTimeUnixNano: started, Ingests: true, Live: true, Workers: 1},
		{Id: "KLMNOPQRST", Host: "h2", Pid: 1808, GrpcAddress: ":50051", Version: "v1", StartTimeUnixNano: started, Behind: 2000},
	}
	sample.subscribers[0].ClientId = "router 1"
	s := updated(screen{addr: "h:1"}, polled{sample: sampled(1, "e", 3, 50)}, polled{sample: sample})
	_, tables, _ := strings.Cut(s.text(), "\n\n")
	want := `WORKER  INSTANCE                MODEL  STATE     RANK  SOURCE     REPLAY   BATCHES/S  DEVICE       DISK  GAPS
w0      ABCDEFGH                m      live         0  live       answers        3.0      10          0  0
w1      KLMNOPQR (handed over)  m      degraded     0  repairing  answers         50      11  1,048,576  2 (9 batches) INCOMPLETE

SUBSCRIBER  CLIENT     FOR    SEQ  BEHIND  ENTRIES/S  FILTER
10.0.0.1:7  router 1  1m2s  2,995       5      1,000  --worker w1 --tier disk

INSTANCE         STATE  HOST   PID  GRPC    VERSION     FOR  WORKERS  BEHIND
ABCDEFGH (this)  live   h1       7  :50051  v1       1h0m0s        1       0
KLMNOPQR         dead   h2    1808  :50051  v1       1h0m0s        -   2,000

w1 rank 0: repairing: the replay of tcp://e is being read; wait`
	if diff := cmp.Diff(want, tables); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestSortAndScroll(t *testing.T) {
	live := func(second int) polled {
		s := sampled(second, "e", 1, 2, 3)
		s.workers[1].Sources[0].State = kvcastv1.SourceState_SOURCE_STATE_LIVE
		return polled{sample: s}
	}
	s := updated(screen{}, tea.WindowSizeMsg{Width: 20, Height: 7}, live(1), live(2))
	shown := func(s screen) (names []string) {
		lines := strings.Split(s.text(), "\n")
		if len(lines) != 7 {
			t.Errorf("got %d lines, want as many as the screen has, 7:\n%s", len(lines), s.text())
		}
		for _, line := range lines[3:6] {
			if ansi.StringWidth(line) > 20 {
				t.Errorf("%q is wider than the screen", line)
			}
			name, _, _ := strings.Cut(line, " ")
			names = append(names, name)
		}
		return names
	}
	for _, step := range []struct {
		keys string
		want []string
	}{
		{"", []string{"WORKER", "w0", "w1"}},
		{"s", []string{"WORKER", "w2", "w1"}}, // by batches
		{"s", []string{"WORKER", "w1", "w2"}}, // by blocks
		{"s", []string{"WORKER", "w1", "w0"}}, // by gaps
		{"s", []string{"WORKER", "w0", "w1"}}, // by name again
		{"k", []string{"WORKER", "w0", "w1"}}, // stops at the first line
		{"j", []string{"w0", "w1", "w2"}},
		{"jjjjjjjjj", []string{"", "SUBSCRIBER", "10.0.0.1:7"}}, // stops at the last line
		{"kkkk", []string{"WORKER", "w0", "w1"}},
	} {
		for _, k := range step.keys {
			s = updated(s, key(string(k)))
		}
		if diff := cmp.Diff(step.want, shown(s)); diff != "" {
			t.Errorf("after %q (-want +got):\n%s", step.keys, diff)
		}
	}
	if _, cmd := s.Update(key("q")); cmd == nil || cmd() != (tea.QuitMsg{}) {
		t.Error("q does not quit")
	}
}

func TestScreenSurvivesFailedPolls(t *testing.T) {
	s := updated(screen{addr: "h:1"}, polled{err: errors.New("no server")})
	if got := s.text(); got != "no server" {
		t.Errorf("before the first sample: got %q", got)
	}
	s = updated(s, polled{sample: sampled(2, "e", 5)}, polled{err: errors.New("no server")})
	if got := s.text(); !strings.Contains(got, "w0") || !strings.HasSuffix(got, "\nno server") {
		t.Errorf("after a failed poll: got\n%s", got)
	}
	// The rates of a restarted server start at 0.
	s = updated(s, polled{sample: sampled(1, "f", 1)})
	if got := s.text(); !strings.Contains(got, "seq 1,000, 0.0/s") || strings.Contains(got, "no server") {
		t.Errorf("got\n%s", got)
	}
}

func TestOnceFailsWithoutAServer(t *testing.T) {
	var out strings.Builder
	s := screen{poll: func(context.Context) (*sample, error) { return nil, errors.New("no server") }, interval: time.Hour}
	if err := s.once(t.Context(), &out); err == nil || err.Error() != "no server" || out.Len() > 0 {
		t.Errorf("got %v and %q", err, out.String())
	}
}

// TestNamesCannotControlTheTerminal covers subscriber names, which clients choose, with
// terminal control characters.
func TestNamesCannotControlTheTerminal(t *testing.T) {
	s := sampled(1, "e", 10)
	s.subscribers[0].Filter = &kvcastv1.Filter{Workers: []string{"x\x1b]0;owned\x07\x1b[2J\nw0  m  live"}}
	s.subscribers[0].UserAgent = "\x1b[31mgrpc"
	s.subscribers[0].ClientId = "\x1b[31mrouter"
	s.workers[0].Name = "w\t0"
	text := updated(screen{}, polled{sample: s}).text()
	if strings.ContainsAny(text, "\x1b\x07\t") || strings.Count(text, "\n") != 7 {
		t.Errorf("got %q", text)
	}
	if !strings.Contains(text, "--worker 'x\uFFFD]0;owned\uFFFD\uFFFD[2J\uFFFDw0  m  live'") {
		t.Errorf("got %q, want the quoted name with replaced control characters", text)
	}
}

// TestScreenSaysWhatToDo checks that the lines about a degraded rank and a replay socket wrap at the width of the screen.
func TestScreenSaysWhatToDo(t *testing.T) {
	degraded := sampled(1, "e", 1)
	degraded.workers[0].Ranks[0].Reasons = []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_SHARED_TIER}
	degraded.workers[0].Sources[0].ReplayEndpoint = "tcp://r"
	degraded.workers[0].Sources[0].ReplayState = kvcastv1.ReplayState_REPLAY_STATE_NEVER_ANSWERED
	s := updated(screen{}, tea.WindowSizeMsg{Width: 60, Height: 40}, polled{sample: degraded})
	const want = `
w0 rank 0: shared_tier: a source was cleared in a tier that
it shares: blocks may be gone; set consolidate: dedup
w0 rank 0: replay never answered: tcp://r; check the
endpoint, and open its port to kvcast
`
	if got := s.text(); !strings.Contains(got, want) || !strings.Contains(got, "never answered ") {
		t.Errorf("got:\n%s\nwant in it:\n%s", got, want)
	}
}
