package observe_test

import (
	"context"
	"testing"

	"google.golang.org/grpc"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

// slowSubscriber is a stream that is read when the test asks for it.
type slowSubscriber struct {
	stream grpc.ServerStreamingClient[kvcastv1.SubscribeResponse]
}

// subscribeSlowly subscribes, and reads the first message.
func subscribeSlowly(t *testing.T, server *harness.Process) slowSubscriber {
	t.Helper()
	const window = 64 << 10 // which does not grow
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	conn := harness.Dial(t, fleet.Address(t, server), grpc.WithInitialWindowSize(window), grpc.WithInitialConnWindowSize(window))
	stream, err := kvcastv1.NewRouterEventServiceClient(conn).Subscribe(ctx, &kvcastv1.SubscribeRequest{})
	if err == nil {
		_, err = stream.Recv()
	}
	if err != nil {
		t.Fatal(err)
	}
	return slowSubscriber{stream}
}

// TestIncidentsOfRouters has routers that read slowly, and one whose predictions are too long.
func TestIncidentsOfRouters(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	needs(t, "prometheus")
	engine := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	serve := func(args ...string) *harness.Process {
		return fleet.Start(t, append(args, "--worker", engineFlag("w", engine.Endpoint(), engine.ReplayEndpoint()))...)
	}
	lags, evicts, aborts := serve("--subscribers-stall", "1h"), serve("--subscribers-stall", "1h", "--journal-max-bytes", "1MiB"), serve("--subscribers-stall", "1s")
	if err := engine.WaitReplays(harness.Context(t), 3); err != nil {
		t.Fatal(err)
	}
	publish(t, engine, enginetest.Stored(1))
	subscribeSlowly(t, lags)
	slow := subscribeSlowly(t, evicts)
	subscribeSlowly(t, aborts)
	is := adminAddresses(t, lags, evicts, aborts)
	p := watch(t, is...)
	alerts := []alert{
		of("KvcastSubscriberLags", "instance", is[0]),
		of("KvcastEntriesEvictedUnread", "instance", is[1]),
		of("KvcastSubscribersAborted", "instance", is[2]),
		of("KvcastOverpredicted", "instance", is[2], "worker", "w"),
	}
	p.quiet(alerts...)

	overpredict(t, fleet.Address(t, aborts), "w")
	// More than any buffer between a server and a subscriber that does not read can have.
	const buffered = 10_000
	harness.WaitFor(t, func() bool {
		for i := range 1000 {
			publish(t, engine, enginetest.Stored(uint64(1+i)))
		}
		m, err := evicts.Metrics(harness.Context(t))
		return err == nil && m.Sum("kvcast_server_journal_oldest_seq") > buffered
	})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			if _, err := slow.stream.Recv(); err != nil {
				return
			}
		}
	}()
	p.wantFiring(nil, alerts...)
	if err := evicts.Kill(); err != nil {
		t.Fatal(err)
	}
	<-ended
}
