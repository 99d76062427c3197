package incident_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/incident"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	gap      = kvcastv1.IncidentKind_INCIDENT_KIND_GAP
	takeover = kvcastv1.IncidentKind_INCIDENT_KIND_TAKEOVER
)

// ids returns the ids of an answer, in its order.
func ids(r *kvcastv1.ListIncidentsResponse) (all []uint64) {
	for _, i := range r.GetIncidents() {
		all = append(all, i.GetId())
	}
	return all
}

func TestListSelectsTheNewestFirst(t *testing.T) {
	l := new(incident.Log)
	l.Add(&kvcastv1.Incident{Kind: gap, Worker: "a", TimeUnixNano: 10})
	l.Add(&kvcastv1.Incident{Kind: takeover, Worker: "b", TimeUnixNano: 20})
	l.Add(&kvcastv1.Incident{Kind: gap, Worker: "b", TimeUnixNano: 30})
	l.Add(&kvcastv1.Incident{Kind: gap, Worker: "a", TimeUnixNano: 40})
	for name, test := range map[string]struct {
		req  *kvcastv1.ListIncidentsRequest
		want []uint64
		more bool
	}{
		"all":          {&kvcastv1.ListIncidentsRequest{}, []uint64{4, 3, 2, 1}, false},
		"kind":         {&kvcastv1.ListIncidentsRequest{Kinds: []kvcastv1.IncidentKind{takeover}}, []uint64{2}, false},
		"worker":       {&kvcastv1.ListIncidentsRequest{Worker: "a"}, []uint64{4, 1}, false},
		"after id":     {&kvcastv1.ListIncidentsRequest{AfterId: 2}, []uint64{4, 3}, false},
		"before id":    {&kvcastv1.ListIncidentsRequest{BeforeId: 3}, []uint64{2, 1}, false},
		"time":         {&kvcastv1.ListIncidentsRequest{FromUnixNano: 20, UntilUnixNano: 40}, []uint64{3, 2}, false},
		"limit":        {&kvcastv1.ListIncidentsRequest{Limit: 3}, []uint64{4, 3, 2}, true},
		"exact limit":  {&kvcastv1.ListIncidentsRequest{Limit: 4}, []uint64{4, 3, 2, 1}, false},
		"nothing":      {&kvcastv1.ListIncidentsRequest{Worker: "c"}, nil, false},
		"kind in part": {&kvcastv1.ListIncidentsRequest{Kinds: []kvcastv1.IncidentKind{gap}, Limit: 1}, []uint64{4}, true},
	} {
		t.Run(name, func(t *testing.T) {
			got := l.List(test.req)
			if diff := cmp.Diff(test.want, ids(got)); diff != "" || got.GetMore() != test.more || got.GetNewestId() != 4 {
				t.Errorf("more %t, newest %d, ids (-want +got):\n%s", got.GetMore(), got.GetNewestId(), diff)
			}
		})
	}
}

// TestFloodOfOneKindEvictsNoOtherKind also covers the bound.
func TestFloodOfOneKindEvictsNoOtherKind(t *testing.T) {
	l := new(incident.Log)
	l.Add(&kvcastv1.Incident{Kind: takeover})
	const flood = 3*incident.PerKind + 5
	for range flood {
		l.Add(&kvcastv1.Incident{Kind: gap})
	}
	if got := ids(l.List(&kvcastv1.ListIncidentsRequest{Kinds: []kvcastv1.IncidentKind{takeover}})); !cmp.Equal(got, []uint64{1}) {
		t.Errorf("got takeovers %v, want 1", got)
	}
	var got []uint64
	for before, more := uint64(0), true; more; {
		page := l.List(&kvcastv1.ListIncidentsRequest{Kinds: []kvcastv1.IncidentKind{gap}, Limit: incident.MaxLimit, BeforeId: before})
		got, more = append(got, ids(page)...), page.GetMore()
		before = got[len(got)-1]
	}
	var want []uint64
	for id := uint64(flood + 1); len(want) < incident.PerKind; id-- {
		want = append(want, id)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestNilLogRemembersNothing(t *testing.T) {
	var l *incident.Log
	l.Add(&kvcastv1.Incident{Kind: gap})
	if got := l.List(&kvcastv1.ListIncidentsRequest{}); len(got.GetIncidents()) != 0 || l.Newest() != 0 {
		t.Errorf("got %v", got)
	}
}
