package main_test

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// TestWhatHappensToAnEngineIsRemembered loses batches, one of them for good, restarts the engine and removes the worker.
func TestWhatHappensToAnEngineIsRemembered(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	p := publisherOf(t, simulator.SocketConfig{})
	s := serve(t, "--worker", "name=w,connect="+p.Endpoint()+",replay="+p.ReplayEndpoint())
	if err := p.WaitSubscribed(harness.Context(t), 1); err != nil {
		t.Fatal(err)
	}
	inspection := kvcastv1.NewInspectionServiceClient(harness.Dial(t, s.Address()))
	// await waits for an incident, and returns it without what differs from run to run.
	await := func(kind kvcastv1.IncidentKind) *kvcastv1.Incident {
		t.Helper()
		var found *kvcastv1.Incident
		harness.WaitFor(t, func() bool {
			got, err := inspection.ListIncidents(t.Context(), &kvcastv1.ListIncidentsRequest{Kinds: []kvcastv1.IncidentKind{kind}, Worker: "w"})
			if err != nil {
				t.Fatal(err)
			}
			if len(got.GetIncidents()) > 0 {
				found = got.GetIncidents()[0]
			}
			return found != nil
		})
		if found.GetTimeUnixNano() == 0 || found.GetId() == 0 {
			t.Errorf("got %v, want an id and a time", found)
		}
		found.Id, found.TimeUnixNano, found.Seq, found.DurationNano = 0, 0, 0, 0
		return found
	}
	want := func(want *kvcastv1.Incident) {
		t.Helper()
		if got := await(want.GetKind()); !proto.Equal(got, want) {
			t.Errorf("got  %v\nwant %v", got, want)
		}
	}
	rank := proto.Uint32(0)
	block := func(hash uint64) wire.Event {
		return wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{hash}, Tokens: []uint32{uint32(hash), 2}, BlockSize: 2}
	}
	publish(t, p, block(1)) // 0
	want(&kvcastv1.Incident{Kind: kvcastv1.IncidentKind_INCIDENT_KIND_WORKER_ADDED, Worker: "w"})
	want(&kvcastv1.Incident{Kind: kvcastv1.IncidentKind_INCIDENT_KIND_SOURCE_UP, Worker: "w", DpRank: rank})
	s.AwaitSample(`kvcast_ingest_batches_total{worker="w"} 1`)

	if _, err := p.Drop(block(2)); err != nil { // 1
		t.Fatal(err)
	}
	publish(t, p, block(3)) // 2
	got := await(kvcastv1.IncidentKind_INCIDENT_KIND_REPAIRED)
	if got.GetReason() != "gap" || got.GetBatches() == 0 {
		t.Errorf("a batch that is replayed: got %v", got)
	}
	if _, err := p.Lose(); err != nil { // 3
		t.Fatal(err)
	}
	publish(t, p, block(4)) // 4
	gap := await(kvcastv1.IncidentKind_INCIDENT_KIND_GAP)
	if gap.GetFirstSeq() != 3 || gap.GetLastSeq() != 3 || gap.GetBatches() != 1 || gap.GetDpRank() != 0 || gap.GetReason() == "" {
		t.Errorf("a batch that is lost: got %v", gap)
	}
	if err := p.Restart(0); err != nil {
		t.Fatal(err)
	}
	publish(t, p, block(5))
	want(&kvcastv1.Incident{Kind: kvcastv1.IncidentKind_INCIDENT_KIND_ENGINE_RESTARTED, Worker: "w", DpRank: rank})

	workers, err := s.Client().ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{})
	if err != nil {
		t.Fatal(err)
	}
	source := workers.GetWorkers()[0].GetSources()[0]
	if source.GetRestarts() != 1 || source.GetRepairs() == 0 || source.EngineDelayNano == nil {
		t.Errorf("got source %v, want a restart, repairs and a delay", source)
	}
	history, err := inspection.GetHistory(t.Context(), &kvcastv1.GetHistoryRequest{})
	if err != nil || len(history.GetSamples()) == 0 || history.GetIntervalNano() != 30e9 {
		t.Errorf("got history %v, %v; want the sample of the start", history, err)
	}

	if _, err := kvcastv1.NewWorkerServiceClient(harness.Dial(t, s.Address())).DeregisterWorker(t.Context(), &kvcastv1.DeregisterWorkerRequest{Name: "w"}); err != nil {
		t.Fatal(err)
	}
	want(&kvcastv1.Incident{Kind: kvcastv1.IncidentKind_INCIDENT_KIND_WORKER_REMOVED, Worker: "w", Reason: "REASON_DEREGISTERED"})
}
