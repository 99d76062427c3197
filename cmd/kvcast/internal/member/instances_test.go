package member

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/ingest"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

func TestHeartbeatHasTheStatesOfOwnedWorkers(t *testing.T) {
	const live, degraded, unknown = kvcastv1.WorkerState_WORKER_STATE_LIVE, kvcastv1.WorkerState_WORKER_STATE_DEGRADED, kvcastv1.WorkerState_WORKER_STATE_UNSPECIFIED
	var many []string
	for i := range maxStates + 1 {
		many = append(many, fmt.Sprint(i))
	}
	for _, tt := range []struct {
		name  string
		owned []string
		want  map[string]kvcastv1.WorkerState
	}{
		{"few", []string{"a", "b", "c"}, map[string]kvcastv1.WorkerState{"a": live, "b": degraded, "c": unknown, "other": live}},
		{"too many", append([]string{"a"}, many...), map[string]kvcastv1.WorkerState{"a": unknown, "0": unknown, "other": unknown}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var h, got heartbeat
			h.setStates(tt.owned, map[string]kvcastv1.WorkerState{"a": live, "b": degraded})
			b, err := json.Marshal(h)
			if err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(b, &got); err != nil {
				t.Fatal(err)
			}
			for worker, want := range tt.want {
				if state := got.state(worker); state != want {
					t.Errorf("%s: got %v, want %v", worker, state, want)
				}
			}
			if len(got.States) > maxStates {
				t.Errorf("%d states", len(got.States))
			}
		})
	}
	if state := new(heartbeat).state("a"); state != unknown {
		t.Errorf("an earlier version's heartbeat: got %v", state)
	}
	if state := (&heartbeat{States: map[string]kvcastv1.WorkerState{"a": 99}}).state("a"); state != 99 {
		t.Errorf("a state of a later version: got %v", state)
	}
}

func TestHeartbeatHasTheSourcesThatAreDown(t *testing.T) {
	now := time.Now()
	sources := []ingest.SourceStatus{{Worker: "up"}, {Worker: "a", Rank: 1, DownSince: now.Add(-time.Second)}, {Worker: "b", DownSince: now.Add(-time.Minute)}, {Worker: "c", DownSince: now}}
	for i := range maxDown {
		sources = append(sources, ingest.SourceStatus{Worker: fmt.Sprint(i), DownSince: now})
	}
	down, next := longest(sources, downSince, now)
	if next != 1 {
		t.Errorf("the next source is down for %v, want 1ns", next)
	}
	b, err := json.Marshal(heartbeat{Down: down})
	if err != nil {
		t.Fatal(err)
	}
	var got heartbeat
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	want := []sourceSince{{"b", 0, time.Minute}, {"a", 1, time.Second}, {"c", 0, 1}, {"0", 0, 1}}
	if diff := cmp.Diff(want, got.Down[:4]); diff != "" || len(got.Down) != maxDown {
		t.Errorf("%d sources are down (-want +got):\n%s", len(got.Down), diff)
	}
}
