package server_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
)

// reporting is a server of a worker w that holds a block, and reports about it.
type reporting struct {
	*fixture
	position *kvcastv1.Position // of the next reports
}

func newReporting(t *testing.T, cfg server.Config) *reporting {
	t.Helper()
	h := &reporting{fixture: overTCP(t, cfg, journal.Config{})}
	h.addWorker()
	h.batch(h.lane, storedBlock(1))
	h.position = h.match(matchOf(1)).GetPosition()
	return h
}

func storedBlock(n uint64) wire.Event {
	return wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: []uint64{n}, TokensHashes: []uint64{n}, BlockSize: 16}
}

// outcome returns an outcome of an EXACT prediction of 64 tokens.
func (h *reporting) outcome(reused uint64) *kvcastv1.Outcome {
	return &kvcastv1.Outcome{Worker: "w", Position: h.position, PredictedTokens: 64, CachedTokens: reused, Trust: kvcastv1.Trust_TRUST_EXACT}
}

// report reports an outcome n times.
func (h *reporting) report(n int, o *kvcastv1.Outcome) {
	h.t.Helper()
	all := slices.Repeat([]*kvcastv1.Outcome{o}, n)
	res, err := h.client.ReportOutcome(h.t.Context(), &kvcastv1.ReportOutcomeRequest{Outcomes: all})
	if err != nil || res.GetIgnored() != 0 {
		h.t.Fatalf("report %v: %v, %v", o, res, err)
	}
}

// rank returns the status of rank 0 of worker w.
func (h *reporting) rank() *kvcastv1.RankStatus {
	h.t.Helper()
	list, err := h.client.ListWorkers(h.t.Context(), &kvcastv1.ListWorkersRequest{})
	if err != nil {
		h.t.Fatal(err)
	}
	return list.GetWorkers()[0].GetRanks()[0]
}

// awaitTrust waits until the trust in the rank and in its match is exact, or is degraded with OVERPREDICTED.
func (h *reporting) awaitTrust(exact bool) {
	h.t.Helper()
	for {
		// One call, since the trust may change between two.
		res, err := h.client.MatchPrefix(h.t.Context(), matchOf(1))
		if err != nil {
			h.t.Fatal(err)
		}
		match, rank := res.GetPrompts()[0].GetMatches()[0], h.rank()
		if isExact := match.GetTrust() == kvcastv1.Trust_TRUST_EXACT; isExact != exact || rank.GetTrust() != match.GetTrust() {
			continue // what was read within the last 100 ms is used
		}
		var want []kvcastv1.DegradedReason
		if !exact {
			want = append(want, kvcastv1.DegradedReason_DEGRADED_REASON_OVERPREDICTED)
		}
		if !slices.Equal(match.GetReasons(), want) || !slices.Equal(rank.GetReasons(), want) {
			h.t.Errorf("got %v and %v, want %v", match, rank, want)
		}
		return
	}
}

func TestRankWhosePredictionsAreTooLongIsDegraded(t *testing.T) {
	t.Parallel()
	h := newReporting(t, server.Config{})
	if h.rank().GetAccuracy() != nil {
		t.Error("a rank without reports has an accuracy")
	}
	h.report(40, h.outcome(64))
	h.report(1, h.outcome(80))
	h.report(7, h.outcome(48))
	h.awaitTrust(true)
	h.report(1, h.outcome(48))
	h.awaitTrust(false)
	want := &kvcastv1.Accuracy{
		Exact: 40, Over: 8, Under: 1, ExactTokens: 41*64 + 8*48, OverTokens: 8 * 16, UnderTokens: 16,
		Detail: "the last 8 outcomes without a removal were all too long by 16 tokens, one block: does the engine drop the last block of each prefix, as with EAGLE and a KV connector?",
	}
	if diff := cmp.Diff(want, h.rank().GetAccuracy(), protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
	if i := h.incidents(kvcastv1.IncidentKind_INCIDENT_KIND_OVERPREDICTED); i.GetWorker() != "w" || i.GetDetail() != want.GetDetail() {
		t.Errorf("got %v", i)
	}
	if n := h.metric("kvcast_overpredicted", "worker", "w", "dp_rank", "0"); n != 1 {
		t.Errorf("kvcast_overpredicted is %v", n)
	}
	for outcome, want := range map[string][2]float64{"exact": {40, 41*64 + 8*48}, "over": {8, 8 * 16}, "under": {1, 16}} {
		labels := []string{"worker", "w", "dp_rank", "0", "outcome", outcome}
		if n, tokens := h.metric("kvcast_predictions_total", labels...), h.metric("kvcast_prediction_tokens_total", labels...); n != want[0] || tokens != want[1] {
			t.Errorf("%s: metrics are %v and %v, want %v", outcome, n, tokens, want)
		}
	}
	// Predictions are not EXACT now, and their outcomes show that they are right again.
	again := h.outcome(64)
	again.Trust = kvcastv1.Trust_TRUST_DEGRADED
	h.report(63, again)
	h.awaitTrust(false)
	h.report(1, again)
	h.awaitTrust(true)
	if i := h.incidents(kvcastv1.IncidentKind_INCIDENT_KIND_ACCURATE); i.GetWorker() != "w" || i.GetDurationNano() == 0 {
		t.Errorf("got %v", i)
	}
}

func TestPredictionsThatWereRightDoNotDegrade(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(h *reporting, o *kvcastv1.Outcome){
		"blocks were removed since": func(h *reporting, _ *kvcastv1.Outcome) {
			h.batch(h.lane, storedBlock(2), wire.Event{Kind: wire.KindRemoved, Tier: kvblock.TierDevice, BlockHashes: []uint64{2}})
		},
		"the cache was cleared since": func(h *reporting, _ *kvcastv1.Outcome) {
			h.batch(h.lane, wire.Event{Kind: wire.KindCleared}, storedBlock(1))
		},
		"the prediction was not EXACT": func(_ *reporting, o *kvcastv1.Outcome) { o.Trust = kvcastv1.Trust_TRUST_UPPER_BOUND },
	} {
		h := newReporting(t, server.Config{})
		o := h.outcome(16)
		change(h, o)
		h.match(matchOf(1))
		h.report(31, o)
		h.report(1, h.outcome(64))
		if a := h.rank().GetAccuracy(); a.GetOver() != 31 || a.GetDetail() != "" {
			t.Errorf("%s: got %v", name, a)
		}
	}
}

// TestRankThatIsDegradedAnywayIsNotJudged loses batches before the reports.
func TestRankThatIsDegradedAnywayIsNotJudged(t *testing.T) {
	t.Parallel()
	h := newReporting(t, server.Config{})
	h.lane.Gap(feed.Gap{Reason: feed.GapReplayIncomplete})
	h.batch(h.lane, storedBlock(2))
	for len(h.match(matchOf(2)).GetPrompts()[0].GetMatches()) == 0 { // the gap is not applied yet
	}
	o := h.outcome(16)
	o.Trust = kvcastv1.Trust_TRUST_UNSPECIFIED
	h.report(100, o)
	if rank := h.rank(); slices.Contains(rank.GetReasons(), kvcastv1.DegradedReason_DEGRADED_REASON_OVERPREDICTED) || rank.GetAccuracy().GetOver() != 100 {
		t.Errorf("got %v", rank)
	}
}

func TestOutcomesOfUnknownRanksAreIgnored(t *testing.T) {
	t.Parallel()
	h := newReporting(t, server.Config{})
	change := func(change func(*kvcastv1.Outcome)) *kvcastv1.Outcome {
		o := h.outcome(64)
		o.Position = &kvcastv1.Position{Epoch: h.position.GetEpoch(), Seq: h.position.GetSeq()}
		change(o)
		return o
	}
	all := []*kvcastv1.Outcome{
		h.outcome(64),
		change(func(o *kvcastv1.Outcome) { o.Worker = "absent" }),
		change(func(o *kvcastv1.Outcome) { o.DpRank = 1 }),
		change(func(o *kvcastv1.Outcome) { o.Position.Epoch = "another" }),
		change(func(o *kvcastv1.Outcome) { o.Position.Seq = 1 << 60 }),
		change(func(o *kvcastv1.Outcome) { o.Position.Seq = 0 }),
	}
	res, err := h.client.ReportOutcome(t.Context(), &kvcastv1.ReportOutcomeRequest{Outcomes: all})
	if err != nil || res.GetIgnored() != 5 {
		t.Errorf("got %v, %v, want 5 ignored", res, err)
	}
	if a := h.rank().GetAccuracy(); a.GetExact() != 1 {
		t.Errorf("got %v", a)
	}
	if n := h.metric("kvcast_predictions_ignored_total"); n != 5 {
		t.Errorf("kvcast_predictions_ignored_total is %v", n)
	}
	// A worker that was added again has no outcomes.
	h.Pipeline.RemoveWorker("w", feed.RemovedDeregistered)
	h.addWorker()
	h.batch(h.lane, storedBlock(3))
	for len(h.match(matchOf(3)).GetPrompts()[0].GetMatches()) == 0 {
	}
	if a := h.rank().GetAccuracy(); a != nil {
		t.Errorf("got %v of a new worker", a)
	}
}

func TestInvalidOutcomes(t *testing.T) {
	t.Parallel()
	h := newReporting(t, server.Config{})
	for want, all := range map[string][]*kvcastv1.Outcome{
		"outcomes: 0 outcomes":                               nil,
		"outcomes: more than 1000 outcomes":                  slices.Repeat([]*kvcastv1.Outcome{h.outcome(1)}, 300_000/100),
		"outcomes[1].worker: is missing":                     {h.outcome(1), {Position: h.position}},
		"outcomes[0].position: is missing":                   {{Worker: "w"}},
		"outcomes[0].predicted_tokens: 1099511627777 is not": {{Worker: "w", Position: h.position, PredictedTokens: 1<<40 + 1}},
		"outcomes[0].cached_tokens: 1099511627777 is not":    {{Worker: "w", Position: h.position, CachedTokens: 1<<40 + 1}},
		"outcomes[0].trust: 9 is not known":                  {{Worker: "w", Position: h.position, Trust: 9}},
	} {
		_, err := h.client.ReportOutcome(t.Context(), &kvcastv1.ReportOutcomeRequest{Outcomes: all})
		wantError(t, err, codes.InvalidArgument, want)
		if len(all) == 0 {
			continue
		}
		s := h.matchPrefixes()
		if err := s.Send(&kvcastv1.MatchPrefixesRequest{Outcomes: all}); err != nil {
			t.Fatal(err)
		}
		_, err = s.Recv()
		wantError(t, err, codes.InvalidArgument, want)
	}
	if a := h.rank().GetAccuracy(); a != nil {
		t.Errorf("got %v after invalid reports", a)
	}
}

func TestMatchPrefixesTakesOutcomes(t *testing.T) {
	t.Parallel()
	h := newReporting(t, server.Config{})
	s := h.matchPrefixes()
	for id, req := range []*kvcastv1.MatchPrefixesRequest{
		{Outcomes: []*kvcastv1.Outcome{h.outcome(64), h.outcome(32)}},
		{Outcomes: []*kvcastv1.Outcome{h.outcome(64)}, Request: matchOf(1)},
		{Request: matchOf(1)},
	} {
		req.Id = uint64(id)
		if err := s.Send(req); err != nil {
			t.Fatal(err)
		}
		m, err := s.Recv()
		if err != nil || m.GetId() != uint64(id) || (m.GetResponse() != nil) != (req.GetRequest() != nil) {
			t.Errorf("request %d: got %v, %v", id, m, err)
		}
	}
	if a := h.rank().GetAccuracy(); a.GetExact() != 2 || a.GetOver() != 1 {
		t.Errorf("got %v", a)
	}
}

// TestRanksThatOthersCallOverpredictedAreDegraded checks the trust in a rank of which other servers have had reports.
func TestRanksThatOthersCallOverpredictedAreDegraded(t *testing.T) {
	t.Parallel()
	h := newReporting(t, server.Config{Cluster: sharing{over: []server.RankSince{{Worker: "w", For: time.Second}}}})
	h.awaitTrust(false)
}

// wantError checks an error's code and that its message contains a text.
func wantError(t *testing.T, err error, code codes.Code, text string) {
	t.Helper()
	if got := status.Convert(err); got.Code() != code || !strings.Contains(got.Message(), text) {
		t.Errorf("got %v, want %v: %s", err, code, text)
	}
}
