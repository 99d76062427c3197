package client_test

import (
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
)

// accuracy returns how right predictions for rank 0 of a worker were, by the server.
func (h *fixture) accuracy(worker string) *kvcastv1.Accuracy {
	h.t.Helper()
	list, err := h.Client(h.t).ListWorkers(h.t.Context(), &kvcastv1.ListWorkersRequest{Filter: &kvcastv1.Filter{Workers: []string{worker}}})
	if err != nil {
		h.t.Fatal(err)
	}
	return list.GetWorkers()[0].GetRanks()[0].GetAccuracy()
}

func TestOutcomeOfAMatch(t *testing.T) {
	h := start(t, server.Config{}, journal.Config{})
	h.batch("w", storing(0, 1, 2, 3))
	c := client.FromConn(h.Dial(t))
	res, err := c.MatchPrefix(t.Context(), client.MatchRequest{Prompts: []client.Prompt{{Model: "m", TokensHashes: []uint64{1, 2, 9}}}})
	if err != nil {
		t.Fatal(err)
	}
	got := res.Matches[0][0].Outcome(res.Position, 48)
	want := client.Outcome{Worker: "w", Position: res.Position, Predicted: 32, Reused: 48, Trust: kvcastv1.Trust_TRUST_EXACT}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestOutcomesAreReportedInSeveralCalls(t *testing.T) {
	h := start(t, server.Config{}, journal.Config{})
	h.batch("w", storing(0, 1, 2, 3))
	at := client.Position{Epoch: h.Journal.Bounds().Epoch, Seq: h.Journal.Bounds().Newest}
	c := client.FromConn(h.Dial(t))
	var all []client.Outcome
	for range 2_001 {
		all = append(all, client.Outcome{Worker: "w", Position: at, Predicted: 16, Reused: 16}, client.Outcome{Worker: "absent", Position: at})
	}
	if ignored, err := c.ReportOutcomes(t.Context(), all...); err != nil || ignored != 2_001 {
		t.Errorf("ignored %d, error %v, want 2001", ignored, err)
	}
	if a := h.accuracy("w"); a.GetExact() != 2_001 {
		t.Errorf("got %v", a)
	}
	if _, err := c.ReportOutcomes(t.Context(), client.Outcome{}); err == nil || !strings.Contains(err.Error(), "outcomes[0].worker: is missing") {
		t.Errorf("got %v", err)
	}
}

// TestReporterReportsWhatIsLeft closes a Reporter at once, while others use it.
func TestReporterReportsWhatIsLeft(t *testing.T) {
	h := start(t, server.Config{}, journal.Config{})
	h.batch("w", storing(0, 1, 2, 3))
	at := client.Position{Epoch: h.Journal.Bounds().Epoch, Seq: h.Journal.Bounds().Newest}
	r := client.FromConn(h.Dial(t)).NewReporter(nil)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 25 {
				r.Report(client.Outcome{Worker: "w", Position: at, Predicted: 32, Reused: 16})
			}
		})
	}
	all.Wait()
	r.Close()
	r.Close()
	if a := h.accuracy("w"); a.GetOver() != 100 || a.GetOverTokens() != 1_600 {
		t.Errorf("got %v", a)
	}
}
