package main_test

import (
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

// TestForeignMessagesEndNoServer publishes messages that are no entries to the subjects of two servers, while an engine publishes. Routers
// of both see each entry once and no gap, also after both servers were started again.
func TestForeignMessagesEndNoServer(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	url := natstest.Start(t)
	js := natstest.JetStream(t, url)
	p := publisherOf(t, simulator.SocketConfig{})
	var servers []*fleet.Server
	var routers []*fleet.Router
	for range 2 {
		s := fleet.NewServer(t, "--journal", url, "--worker", "name=w,model=m,connect="+p.Endpoint()+",replay="+p.ReplayEndpoint())
		s.Start(t)
		servers, routers = append(servers, s), append(routers, fleet.Follow(t, s.Proxy.Addr(), fleet.RouterConfig{Lossless: true}))
	}
	if err := p.WaitSubscribed(harness.Context(t), 1); err != nil {
		t.Fatal(err)
	}
	blocks := uint32(0)
	goOn := func() {
		t.Helper()
		for range 5 {
			publish(t, p, chainedBlock(uint64(blocks)))
			blocks++
		}
		for i, s := range servers {
			awaitRank(t, harness.ServerOf(t, s.Process), kvcastv1.Trust_TRUST_EXACT, blocks)
			if err := routers[i].Err(); err != nil {
				t.Fatalf("router %d: %v", i, err)
			}
		}
	}
	goOn()
	last := func() *jetstream.RawStreamMsg {
		s, err := js.Stream(t.Context(), "kvcast")
		if err != nil {
			t.Fatal(err)
		}
		m, err := s.GetLastMsgForSubject(t.Context(), "kvcast.kvcast.w")
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	foreign := []*nats.Msg{
		{Subject: "kvcast.kvcast.w", Data: []byte("hello")},
		{Subject: "kvcast.kvcast.w", Header: nats.Header{"Kvcast": last().Header["Kvcast"]}, Data: last().Data}, // a copy
		{Subject: "kvcast.kvcast.other", Data: []byte("hello")},
		{Subject: "kvcast.kvcast.%zz"},
		{Subject: "kvcast.kvcast.w", Header: nats.Header{"Status": {"503"}}},
	}
	for _, m := range foreign {
		if _, err := js.PublishMsg(t.Context(), m); err != nil {
			t.Fatal(err)
		}
		goOn()
	}
	for _, s := range servers {
		harness.ServerOf(t, s.Process).AwaitSample("kvcast_journal_foreign_messages_total 5")
		if err := s.Process.Stop(); err != nil {
			t.Fatal(err)
		}
		s.Start(t)
	}
	goOn()
}
