package cluster_test

import (
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

// ttl is the default of cluster.ttl.
const ttl = 3 * time.Second

// TestAnswersSayWhenTheyAreStale cuts one of two servers off from the NATS server. It cannot know whether its blocks are the engines' then,
// and must say so, in ListWorkers and in matches. The other takes the workers over, and both are exact again afterwards.
func TestAnswersSayWhenTheyAreStale(t *testing.T) {
	testclass.Cluster(t)
	t.Parallel()
	u, err := url.Parse(natstest.Start(t))
	if err != nil {
		t.Fatal(err)
	}
	engines := fleet.New(t, *seed)
	engines.Rate = batchRate
	var args []string
	for _, name := range []string{"engine-0", "engine-1", "engine-2", "engine-3"} {
		args = append(args, "--worker", engines.Add(name, 1, fleet.Bound()).Flag())
	}
	var servers []*fleet.Server
	clients := make(map[*fleet.Server]kvcastv1.RouterEventServiceClient)
	var proxies []*harness.Proxy
	for range 2 {
		p := harness.NewProxy(t, u.Host)
		s := fleet.NewServer(t, append(slices.Clone(args), "--journal", "nats://"+p.Addr(), "--subscribers-progress", "1s")...)
		s.Start(t)
		engines.Ask(s.Proxy.Addr())
		fleet.Follow(t, s.Proxy.Addr(), fleet.RouterConfig{}).Tell(engines.Truth)
		clients[s] = kvcastv1.NewRouterEventServiceClient(harness.Dial(t, s.Proxy.Addr()))
		servers, proxies = append(servers, s), append(proxies, p)
	}
	// ranks returns the ranks of all workers, as a server lists them; nil if they are not those of all engines.
	ranks := func(s *fleet.Server) (all []*kvcastv1.RankStatus) {
		t.Helper()
		list, err := clients[s].ListWorkers(harness.Context(t), &kvcastv1.ListWorkersRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range list.GetWorkers() {
			for _, r := range w.GetRanks() {
				all = append(all, r)
				if isStale(r) && w.GetState() == kvcastv1.WorkerState_WORKER_STATE_LIVE {
					t.Errorf("%s is live, and its rank is stale: %v", w.GetName(), r)
				}
			}
		}
		return all
	}
	awaitExact := func(s *fleet.Server) {
		t.Helper()
		harness.WaitFor(t, func() bool {
			all := ranks(s)
			return len(all) == 4 && !slices.ContainsFunc(all, func(r *kvcastv1.RankStatus) bool {
				return isStale(r) || time.Duration(r.GetAgeNano()) > ttl
			})
		})
	}
	awaitStale := func(s *fleet.Server) {
		t.Helper()
		harness.WaitFor(t, func() bool {
			all := ranks(s)
			return len(all) == 4 && !slices.ContainsFunc(all, func(r *kvcastv1.RankStatus) bool { return !isStale(r) })
		})
		for _, r := range ranks(s) {
			if r.GetTrust() != kvcastv1.Trust_TRUST_DEGRADED || time.Duration(r.GetAgeNano()) < ttl {
				t.Errorf("stale, with %v at an age of %v", r.GetTrust(), time.Duration(r.GetAgeNano()))
			}
		}
	}
	for _, s := range servers {
		awaitExact(s)
	}
	// subscribe returns a stream of a server.
	subscribe := func(s *fleet.Server) kvcastv1.RouterEventService_SubscribeClient {
		t.Helper()
		stream, err := clients[s].Subscribe(harness.Context(t), &kvcastv1.SubscribeRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return stream
	}
	// wantOutdated reads a stream until it ends, since the server knows that it is outdated.
	wantOutdated := func(stream kvcastv1.RouterEventService_SubscribeClient) {
		t.Helper()
		for {
			_, err := stream.Recv()
			if err == nil {
				continue
			}
			var info *errdetails.ErrorInfo
			var retry *errdetails.RetryInfo
			for _, d := range status.Convert(err).Details() {
				switch d := d.(type) {
				case *errdetails.ErrorInfo:
					info = d
				case *errdetails.RetryInfo:
					retry = d
				}
			}
			if status.Code(err) != codes.Unavailable || info.GetReason() != "OUTDATED" || retry == nil {
				t.Errorf("the stream ended with %v, %v and %v", err, info, retry)
			}
			return
		}
	}
	stream := subscribe(servers[0])
	proxies[0].Partition()
	wantOutdated(stream)
	wantOutdated(subscribe(servers[0]))
	if _, err := servers[0].Process.Get(harness.Context(t), "/readyz"); err == nil || !strings.Contains(err.Error(), "503") {
		t.Errorf("/readyz of an outdated server: %v", err)
	}
	awaitStale(servers[0])
	awaitExact(servers[1]) // it has taken over
	proxies[0].Heal()
	awaitExact(servers[0])
}

func isStale(r *kvcastv1.RankStatus) bool {
	return slices.Contains(r.GetReasons(), kvcastv1.DegradedReason_DEGRADED_REASON_STALE)
}

// TestDeletedBucketOfInstancesIsCreatedAgain deletes the bucket with the heartbeats. The servers must know of each other again without a
// restart.
func TestDeletedBucketOfInstancesIsCreatedAgain(t *testing.T) {
	testclass.Cluster(t)
	t.Parallel()
	address := natstest.Start(t)
	engines := fleet.New(t, *seed)
	engines.Rate = batchRate
	worker := engines.Add("engine-0", 1, fleet.Bound()).Flag()
	var clients []kvcastv1.RouterEventServiceClient
	var servers []*fleet.Server
	for range 2 {
		s := fleet.NewServer(t, "--journal", address, "--worker", worker, "--subscribers-progress", "1s")
		s.Start(t)
		engines.Ask(s.Proxy.Addr())
		clients = append(clients, kvcastv1.NewRouterEventServiceClient(harness.Dial(t, s.Proxy.Addr())))
		servers = append(servers, s)
	}
	// awaitAll waits until each server is ready, and knows of both and of a rank that is up to date.
	awaitAll := func() {
		t.Helper()
		for i, c := range clients {
			harness.WaitFor(t, func() bool {
				status, err := c.GetStatus(t.Context(), &kvcastv1.GetStatusRequest{})
				if err != nil {
					t.Fatal(err)
				}
				live := 0
				for _, i := range status.GetInstances() {
					if i.GetLive() {
						live++
					}
				}
				list, err := c.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{})
				if err != nil {
					t.Fatal(err)
				}
				_, unready := servers[i].Process.Get(t.Context(), "/readyz")
				return live == 2 && unready == nil && len(list.GetWorkers()) == 1 && len(list.GetWorkers()[0].GetRanks()) == 1 && !isStale(list.GetWorkers()[0].GetRanks()[0])
			})
		}
	}
	awaitAll()
	conn, err := nats.Connect(address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := js.DeleteKeyValue(harness.Context(t), stream+"-instances"); err != nil {
			t.Fatal(err)
		}
		// Two servers write six values in the time after which they hold each other for dead.
		harness.WaitFor(t, func() bool {
			s, err := js.Stream(t.Context(), "KV_"+stream+"-instances")
			return err == nil && s.CachedInfo().State.LastSeq > 12
		})
		awaitAll()
	}
}
