package server_test

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
)

// sharing is a server.Cluster.
type sharing struct {
	instances []*kvcastv1.InstanceStatus
	owners    map[string]*kvcastv1.WorkerOwner
	states    map[string]kvcastv1.WorkerState
	down      []server.RankSince
	over      []server.RankSince
}

func (s sharing) ID() string                               { return s.instances[0].GetId() }
func (s sharing) Instances() []*kvcastv1.InstanceStatus    { return s.instances }
func (s sharing) Owners() map[string]*kvcastv1.WorkerOwner { return s.owners }
func (s sharing) SourcesDown() []server.RankSince          { return s.down }
func (s sharing) Overpredicted() []server.RankSince        { return s.over }

func (s sharing) WorkerStates() map[string]kvcastv1.WorkerState { return s.states }

func TestStatusHasTheInstancesAndOwners(t *testing.T) {
	t.Parallel()
	c := sharing{
		instances: []*kvcastv1.InstanceStatus{{Id: "a", Live: true}, {Id: "b"}},
		owners:    map[string]*kvcastv1.WorkerOwner{"w": {InstanceId: "a"}, "absent": {InstanceId: "b", HandedOver: true}},
	}
	sources := map[string][]*kvcastv1.SourceStatus{"unowned": {{State: kvcastv1.SourceState_SOURCE_STATE_CONNECTING}}}
	h := overTCP(t, server.Config{Cluster: c, Sources: func() map[string][]*kvcastv1.SourceStatus { return sources }}, journal.Config{})
	h.addWorker()
	status, err := h.client.GetStatus(t.Context(), &kvcastv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	want := &kvcastv1.GetStatusResponse{InstanceId: "a", Instances: c.instances}
	got := &kvcastv1.GetStatusResponse{InstanceId: status.GetInstanceId(), Instances: status.GetInstances()}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
	for _, tt := range []struct {
		filter []string
		want   map[string]*kvcastv1.WorkerOwner
	}{
		{nil, map[string]*kvcastv1.WorkerOwner{"w": c.owners["w"], "absent": c.owners["absent"], "unowned": {}}},
		{[]string{"absent"}, map[string]*kvcastv1.WorkerOwner{"absent": c.owners["absent"]}},
	} {
		list, err := h.client.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{Filter: &kvcastv1.Filter{Workers: tt.filter}})
		if err != nil {
			t.Fatal(err)
		}
		owners := make(map[string]*kvcastv1.WorkerOwner)
		for _, w := range list.GetWorkers() {
			owners[w.GetName()] = w.GetOwner()
		}
		if diff := cmp.Diff(tt.want, owners, protocmp.Transform()); diff != "" {
			t.Errorf("owners of %v (-want +got):\n%s", tt.filter, diff)
		}
	}
}

// TestWorkersHaveTheStatesThatTheirOwnersReport has one worker that this server reads, too: its own sources count.
func TestWorkersHaveTheStatesThatTheirOwnersReport(t *testing.T) {
	t.Parallel()
	const live, degraded, unknown = kvcastv1.WorkerState_WORKER_STATE_LIVE, kvcastv1.WorkerState_WORKER_STATE_DEGRADED, kvcastv1.WorkerState_WORKER_STATE_UNSPECIFIED
	c := sharing{
		instances: []*kvcastv1.InstanceStatus{{Id: "a", Live: true}, {Id: "b", Live: true}},
		owners:    map[string]*kvcastv1.WorkerOwner{"w": {InstanceId: "b"}, "read": {InstanceId: "a"}, "absent": {InstanceId: "b"}},
		states:    map[string]kvcastv1.WorkerState{"w": degraded, "read": degraded},
	}
	sources := map[string][]*kvcastv1.SourceStatus{"read": {{State: kvcastv1.SourceState_SOURCE_STATE_LIVE}}}
	h := overTCP(t, server.Config{Cluster: c, Sources: func() map[string][]*kvcastv1.SourceStatus { return sources }}, journal.Config{})
	h.addWorker()
	list, err := h.client.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{})
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]kvcastv1.WorkerState)
	for _, w := range list.GetWorkers() {
		got[w.GetName()] = w.GetState()
	}
	if diff := cmp.Diff(map[string]kvcastv1.WorkerState{"w": degraded, "read": live, "absent": unknown}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestSourcesThatOthersHaveLostAreDown checks the trust in the worker of another server.
func TestSourcesThatOthersHaveLostAreDown(t *testing.T) {
	t.Parallel()
	c := sharing{
		instances: []*kvcastv1.InstanceStatus{{Id: "a", Live: true}, {Id: "b", Live: true}},
		owners:    map[string]*kvcastv1.WorkerOwner{"w": {InstanceId: "b"}},
		down:      []server.RankSince{{Worker: "w", Rank: 0, For: time.Hour}, {Worker: "w", Rank: 1, For: time.Hour}},
	}
	h := overTCP(t, server.Config{Cluster: c}, journal.Config{})
	h.addWorker()
	h.batch(h.lane, wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: []uint64{1}, TokensHashes: []uint64{1}, BlockSize: 16})
	match := h.match(matchOf(1)).GetPrompts()[0].GetMatches()[0]
	list, err := h.client.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{})
	if err != nil {
		t.Fatal(err)
	}
	rank := list.GetWorkers()[0].GetRanks()[0]
	for name, got := range map[string]interface {
		GetTrust() kvcastv1.Trust
		GetReasons() []kvcastv1.DegradedReason
		GetDownNano() uint64
	}{"MatchPrefix": match, "ListWorkers": rank} {
		want := []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_SOURCE_DOWN}
		if got.GetTrust() != kvcastv1.Trust_TRUST_DEGRADED || !slices.Equal(got.GetReasons(), want) || got.GetDownNano() < uint64(time.Hour) {
			t.Errorf("%s: got %v", name, got)
		}
	}
}
