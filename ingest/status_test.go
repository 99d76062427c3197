package ingest_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/test/harness"
)

// TestSourcesReportTheirState reads an endpoint without an engine.
func TestSourcesReportTheirState(t *testing.T) {
	t.Parallel()
	in, err := ingest.New(config.Config{Workers: []config.Worker{{
		Name:    "w",
		Sources: []config.Source{{Connect: "tcp://127.0.0.1:9", Replay: "tcp://127.0.0.1:109", DPSize: 2}},
	}}}, newRecorder(t))
	if err != nil {
		t.Fatal(err)
	}
	source := func(rank uint32, endpoint, replay string, state ingest.SourceState) ingest.SourceStatus {
		return ingest.SourceStatus{Worker: "w", Engine: feed.EngineVLLM, Endpoint: endpoint, Replay: replay, ReplayState: ingest.ReplayNeverAnswered, Rank: rank, State: state}
	}
	for _, state := range []ingest.SourceState{ingest.SourceConnecting, ingest.SourceStopped} {
		want := []ingest.SourceStatus{
			source(0, "tcp://127.0.0.1:9", "tcp://127.0.0.1:109", state),
			source(1, "tcp://127.0.0.1:10", "tcp://127.0.0.1:110", state),
		}
		got := in.Sources()
		for i := range got {
			if s := &got[i]; s.DownSince.IsZero() || s.DownSince.After(time.Now()) {
				t.Errorf("rank %d, %v: down since %v", s.Rank, s.State, s.DownSince)
			} else {
				s.DownSince = time.Time{}
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("sources (-want +got):\n%s", diff)
		}
		if state == ingest.SourceStopped {
			break
		}
		done, cancel := context.WithCancel(t.Context())
		cancel()
		if err := in.Run(done); err != nil {
			t.Fatal(err)
		}
	}
}

// TestReplaySocketsReportTheirState reads an engine whose replay socket answers, and then does not.
func TestReplaySocketsReportTheirState(t *testing.T) {
	t.Parallel()
	v := newView()
	c := newCache(t, simulator.PublisherConfig{})
	in, _ := start(t, config.Config{
		ReplayTimeout: 10 * time.Second, Silence: time.Hour,
		Workers: []config.Worker{{Name: "w", Sources: []config.Source{{Connect: c.Endpoint(), Replay: c.ReplayEndpoint()}}}},
	}, v)
	state := func() ingest.ReplayState { return in.Sources()[0].ReplayState }
	c.must(c.WaitSubscribed(t.Context(), 1))
	c.caughtUp(v)
	harness.WaitFor(t, func() bool { return state() == ingest.ReplayAnswers })
	c.must(c.SetReplayFaults(simulator.ReplayFaults{NoAnswer: true}))
	c.store(c.Drop, 1)
	c.store(c.Publish, 1)
	harness.WaitFor(t, func() bool { return state() == ingest.ReplayUnanswered })
}
