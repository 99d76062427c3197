package server_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
)

// sharing is a server.Cluster.
type sharing struct {
	instances []*kvcastv1.InstanceStatus
	owners    map[string]*kvcastv1.WorkerOwner
}

func (s sharing) ID() string                               { return s.instances[0].GetId() }
func (s sharing) Instances() []*kvcastv1.InstanceStatus    { return s.instances }
func (s sharing) Owners() map[string]*kvcastv1.WorkerOwner { return s.owners }

func TestStatusHasTheInstancesAndOwners(t *testing.T) {
	c := sharing{
		[]*kvcastv1.InstanceStatus{{Id: "a", Live: true}, {Id: "b"}},
		map[string]*kvcastv1.WorkerOwner{"w": {InstanceId: "a"}, "absent": {InstanceId: "b", HandedOver: true}},
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
