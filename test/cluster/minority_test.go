package cluster_test

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

// election is the time after which NATS servers elect another leader of a stream at the earliest.
const election = 4 * time.Second

// TestServerWithoutAMajorityDoesNotJudgePositions pauses all NATS servers but the leader of the stream. A position that a kvcast server has
// not read may then be one that the others have accepted: it must not be called wrong, since a router would take an older snapshot.
func TestServerWithoutAMajorityDoesNotJudgePositions(t *testing.T) {
	testclass.Cluster(t)
	t.Parallel()
	nats := natstest.StartCluster(t)
	engines := fleet.New(t, *seed)
	args := []string{"--journal-replicas", "3", "--subscribers-progress", "1s", "--worker", engines.Add("engine-0", 1, fleet.Bound()).Flag()}
	first := fleet.NewServer(t, append(args, "--journal", nats.URLs())...)
	first.Start(t)
	s, err := nats.JetStream().Stream(harness.Context(t), stream)
	if err != nil {
		t.Fatal(err)
	}
	urls := strings.Split(nats.URLs(), ",")
	var leader int
	if _, err := fmt.Sscanf(s.CachedInfo().Cluster.Leader, "nats-%d", &leader); err != nil {
		t.Fatalf("the stream has the leader %q", s.CachedInfo().Cluster.Leader)
	}
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	second := fleet.NewServer(t, append(args, "--journal", urls[leader])...)
	second.Start(t)
	router := kvcastv1.NewRouterEventServiceClient(harness.Dial(t, second.Proxy.Addr()))
	info, err := router.GetStatus(harness.Context(t), &kvcastv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	// subscribe returns the reason of the error that a subscription from a position ends with, which no server has.
	subscribe := func() string {
		t.Helper()
		entries, err := router.Subscribe(harness.Context(t), &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_After{
			After: &kvcastv1.Position{Epoch: info.GetEpoch(), Seq: info.GetNewestSeq() + 1_000_000},
		}})
		if err == nil {
			_, err = entries.Recv()
		}
		if code := status.Code(err); code != codes.OutOfRange && code != codes.Unavailable {
			t.Fatalf("got %v", err)
		}
		for _, detail := range status.Convert(err).Details() {
			if info, ok := detail.(*errdetails.ErrorInfo); ok {
				return info.GetReason()
			}
		}
		t.Fatalf("no reason: %v", err)
		return ""
	}
	// OUTDATED precedes what the position says.
	notJudged := func(reason string) bool { return reason == "BEHIND" || reason == "OUTDATED" }
	if got := subscribe(); got != client.ReasonPositionAhead {
		t.Errorf("with a majority: got %s, want %s", got, client.ReasonPositionAhead)
	}
	for i := range urls {
		if i != leader {
			nats.Signal(i, syscall.SIGSTOP)
			defer nats.Signal(i, syscall.SIGCONT)
		}
	}
	paused := time.Now()
	pace := time.NewTicker(100 * time.Millisecond)
	defer pace.Stop()
	for got := ""; !notJudged(got) || time.Since(paused) < 2*election; <-pace.C {
		asked := time.Now()
		if got = subscribe(); !notJudged(got) && asked.Sub(paused) >= election {
			t.Fatalf("without a majority for %v: got %s, want BEHIND or OUTDATED", asked.Sub(paused), got)
		}
	}
}
