package incident_test

import (
	"fmt"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/incident"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// TestGapsAreIncidents checks that there is an incident for each reason of a Gap, with the tiers and the detail.
func TestGapsAreIncidents(t *testing.T) {
	rank, tiers := proto.Uint32(3), []kvcastv1.Tier{kvcastv1.Tier_TIER_HOST_PINNED, kvcastv1.Tier_TIER_DISK}
	for number, name := range kvcastv1.Gap_Reason_name {
		l := new(incident.Log)
		l.AddEvent(index.Origin{Worker: "w", Seq: 7, IngestTime: 9}, &kvcastv1.RouterEvent{DpRank: rank, Event: &kvcastv1.RouterEvent_Gap{
			Gap: &kvcastv1.Gap{Reason: kvcastv1.Gap_Reason(number), MissedBatches: 2, FirstSeq: 4, LastSeq: 5, Tiers: tiers, Detail: "what"},
		}})
		want := &kvcastv1.Incident{
			Id: 1, TimeUnixNano: 9, Kind: gap, Worker: "w", DpRank: rank, Reason: name, Seq: 7, Batches: 2, FirstSeq: 4, LastSeq: 5, Tiers: tiers, Detail: "what",
		}
		if kvcastv1.Gap_Reason(number) == kvcastv1.Gap_REASON_AMBIGUOUS_PUBLISHER {
			want.Kind = kvcastv1.IncidentKind_INCIDENT_KIND_CONFLICT
		}
		if got := l.List(&kvcastv1.ListIncidentsRequest{}).GetIncidents(); len(got) != 1 || !proto.Equal(got[0], want) {
			t.Errorf("%s: got %v, want %v", name, fmt.Sprint(got), want)
		}
	}
}
