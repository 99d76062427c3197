package member

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/ingest"
)

func TestHeartbeatHasTheSourcesThatAreDown(t *testing.T) {
	now := time.Now()
	sources := []ingest.SourceStatus{{Worker: "up"}, {Worker: "a", Rank: 1, DownSince: now.Add(-time.Second)}, {Worker: "b", DownSince: now.Add(-time.Minute)}, {Worker: "c", DownSince: now}}
	for i := range maxDown {
		sources = append(sources, ingest.SourceStatus{Worker: fmt.Sprint(i), DownSince: now})
	}
	b, err := json.Marshal(heartbeat{Down: downSources(sources, now)})
	if err != nil {
		t.Fatal(err)
	}
	var got heartbeat
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	want := []downSource{{"b", 0, time.Minute}, {"a", 1, time.Second}, {"c", 0, 1}, {"0", 0, 1}}
	if diff := cmp.Diff(want, got.Down[:4]); diff != "" || len(got.Down) != maxDown {
		t.Errorf("%d sources are down (-want +got):\n%s", len(got.Down), diff)
	}
}
