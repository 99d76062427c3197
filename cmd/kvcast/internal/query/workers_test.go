package query

import (
	"bytes"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

func TestWorkersHaveAnInstanceInACluster(t *testing.T) {
	live := kvcastv1.WorkerState_WORKER_STATE_LIVE
	workers := []*kvcastv1.WorkerStatus{
		{Name: "w0", Model: "m", State: live, Sources: []*kvcastv1.SourceStatus{
			{Endpoint: "tcp://e:1", State: kvcastv1.SourceState_SOURCE_STATE_LIVE, Started: true, LastSeq: 7, ReplayState: kvcastv1.ReplayState_REPLAY_STATE_ANSWERS},
		}},
		{Name: "w1", Model: "m", Ranks: []*kvcastv1.RankStatus{{}}},
		{Name: "w2"},
	}
	for _, tt := range []struct {
		owners []*kvcastv1.WorkerOwner
		want   string
	}{
		{nil, `WORKER  MODEL  STATE    RANK  SOURCE  REPLAY   BLOCKS  GAPS  LAST SEQ  READ FROM  ENDPOINT
w0      m      live     0     live    answers  0       0     7         tcp://e:1  -
w1      m      unknown  0     -       -        0       0     -         -          -
w2      -      unknown  -     -       -        -       -     -         -          -
`},
		{[]*kvcastv1.WorkerOwner{{InstanceId: "ABCDEFGHIJ"}, {InstanceId: "KLMNOPQRST", HandedOver: true}, {}},
			`INSTANCE                WORKER  MODEL  STATE    RANK  SOURCE  REPLAY   BLOCKS  GAPS  LAST SEQ  READ FROM  ENDPOINT
ABCDEFGH                w0      m      live     0     live    answers  0       0     7         tcp://e:1  -
KLMNOPQR (handed over)  w1      m      unknown  0     -       -        0       0     -         -          -
-                       w2      -      unknown  -     -       -        -       -     -         -          -
`},
	} {
		for i, o := range tt.owners {
			workers[i].Owner = o
		}
		var out bytes.Buffer
		if err := writeTable(&out, workers); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(tt.want, out.String()); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

func TestStatusListsTheInstancesOfACluster(t *testing.T) {
	s := &kvcastv1.GetStatusResponse{Version: "v1", Epoch: "e", OldestSeq: 1, NewestSeq: 100, JournalBytes: 1 << 20, Workers: 3, Blocks: 9, Subscribers: 2}
	const alone = `version      v1
epoch        e
entries      1 to 100 (1.0 MiB)
workers      3
blocks       9
subscribers  2
`
	started := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC).UnixNano()
	clustered := &kvcastv1.GetStatusResponse{InstanceId: "ABCDEFGHIJ", Instances: []*kvcastv1.InstanceStatus{
		{Id: "ABCDEFGHIJ", Host: "h1", Pid: 7, GrpcAddress: "[::]:50051", Version: "v1", StartTimeUnixNano: started, Ingests: true, Live: true, Workers: 2},
		{Id: "KLMNOPQRST", Host: "h2", Pid: 8, GrpcAddress: "[::]:50051", Version: "v1", StartTimeUnixNano: started, Ingests: true, Live: true, Draining: true, Behind: 2, Workers: 1},
		{Id: "UVWXYZABCD", Host: "h3\n", Pid: 9, GrpcAddress: "[::]:50051", Version: "v1", StartTimeUnixNano: started, Behind: 60},
	}}
	const cluster = alone + `instance     ABCDEFGH

INSTANCE  STATE     HOST  PID  GRPC        VERSION  STARTED               WORKERS  BEHIND
ABCDEFGH  live      h1    7    [::]:50051  v1       2026-01-02T03:04:05Z  2        0
KLMNOPQR  draining  h2    8    [::]:50051  v1       2026-01-02T03:04:05Z  1        2
UVWXYZAB  dead      ` + "h3\uFFFD" + `   9    [::]:50051  v1       2026-01-02T03:04:05Z  -        60
`
	for _, tt := range []struct {
		cluster *kvcastv1.GetStatusResponse
		want    string
	}{{nil, alone}, {clustered, cluster}} {
		s.InstanceId, s.Instances = tt.cluster.GetInstanceId(), tt.cluster.GetInstances()
		var out bytes.Buffer
		if err := writeStatus(&out, s, nil); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(tt.want, out.String()); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

// TestStatusSaysWhatIsWrong has a worker with two dp ranks, of which one is degraded, and replay sockets in two states.
func TestStatusSaysWhatIsWrong(t *testing.T) {
	source := func(rank uint32, replay kvcastv1.ReplayState) *kvcastv1.SourceStatus {
		return &kvcastv1.SourceStatus{
			DpRank: rank, Endpoint: "tcp://e:1", ReplayEndpoint: "tcp://e:2", State: kvcastv1.SourceState_SOURCE_STATE_LIVE, Started: true, ReplayState: replay,
		}
	}
	workers := []*kvcastv1.WorkerStatus{{
		Name: "w", Ranks: []*kvcastv1.RankStatus{{}, {DpRank: 1, Reasons: []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_CONFLICT}}},
		Sources: []*kvcastv1.SourceStatus{source(0, kvcastv1.ReplayState_REPLAY_STATE_ANSWERS), source(1, kvcastv1.ReplayState_REPLAY_STATE_NEVER_ANSWERED)},
	}}
	var out bytes.Buffer
	if err := writeStatus(&out, &kvcastv1.GetStatusResponse{Version: "v1", Epoch: "e", Workers: 1}, workers); err != nil {
		t.Fatal(err)
	}
	want := `version      v1
epoch        e
entries      0 to 0 (0.0 MiB)
workers      1
blocks       0
subscribers  0
degraded     conflict 1
replay       answers 1, never answered 1

w rank 1: conflict: two publishers use one topic and rank, and their blocks are mixed; give each its own topic or rank
w rank 1: replay never answered: tcp://e:2; check the endpoint, and open its port to kvcast
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
