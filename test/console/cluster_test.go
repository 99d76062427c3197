package console_test

import (
	"net/http/httptest"
	"testing"

	"github.com/kvcast/kvcast/internal/console"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/incident"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/harness"
)

// shared is what a server tells of those that share its journal.
type shared struct{}

func (shared) ID() string { return "THISSERVER0000000000000000" }

func (s shared) Instances() []*kvcastv1.InstanceStatus {
	return []*kvcastv1.InstanceStatus{
		{Id: s.ID(), Host: "host-a", Pid: 7, GrpcAddress: ":50051", Version: "v1", Ingests: true, Live: true, Workers: 2},
		{Id: "OTHERSERVER000000000000000", Host: "host-b", Pid: 8, GrpcAddress: ":50051", Version: "v1", Ingests: true},
	}
}

func (s shared) Owners() map[string]*kvcastv1.WorkerOwner {
	return map[string]*kvcastv1.WorkerOwner{"w": {InstanceId: s.ID()}}
}

func (s shared) SourcesDown() []server.RankSince { return nil }

func (s shared) Overpredicted() []server.RankSince { return nil }

func (s shared) WorkerStates() map[string]kvcastv1.WorkerState { return nil }

func TestServersAndLeasesAreShown(t *testing.T) {
	testclass.Process(t)
	b := startBrowser(t)
	log := new(incident.Log)
	i := harness.StartInstance(t, harness.InstanceConfig{Server: server.Config{Incidents: log, Cluster: shared{}}})
	i.AddWorker(feed.Worker{Name: "w", Model: "m"})
	log.Add(&kvcastv1.Incident{Kind: kvcastv1.IncidentKind_INCIDENT_KIND_TAKEOVER, Worker: "w", Reason: "owner_dead", DurationNano: 25e6, Seq: 1})
	c := console.New(console.Config{Server: i.Server, Loopback: true})
	s := httptest.NewServer(c)
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
		c.Close()
	})
	p := b.open(s.URL + "/#/stream")
	p.awaitText("td", "THISSERV (this)")
	p.awaitText("td", "OTHERSER")
	p.awaitText("td", "dead")
	p.awaitText("td", "owner dead, took 25 ms")
	p.show("#/worker/w")
	p.awaitText("main", "read by THISSERV")
	p.show("#/log?kinds=takeover")
	p.awaitText("td", "owner dead, took 25 ms")
	// What happens while the page is open appears.
	log.Add(&kvcastv1.Incident{Kind: kvcastv1.IncidentKind_INCIDENT_KIND_TAKEOVER, Worker: "w", Reason: "handed_over"})
	p.awaitText("td", "handed over")
	wantQuiet(t, b)
}
