package main_test

import (
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

// TestDeletedStreamsLoseNoRegistration deletes a stream while two servers read a worker that was registered, and starts another server
// after both have ended.
func TestDeletedStreamsLoseNoRegistration(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	for _, tt := range []struct {
		stream string
		error  string // with which the servers end; empty: they go on
	}{
		{"kvcast", `stream "kvcast" of .* is gone|has the new epoch`},
		{"KV_kvcast-workers", ""},
	} {
		t.Run(tt.stream, func(t *testing.T) {
			t.Parallel()
			url := natstest.Start(t)
			js := natstest.JetStream(t, url)
			p := publisherOf(t, simulator.SocketConfig{})
			begin := func() *process {
				return harness.ServerOf(t, launch(t, "--journal", url, "--bind", "tcp://127.0.0.1:*"))
			}
			servers := []*process{begin(), begin()}
			spec := &kvcastv1.WorkerSpec{Name: "w", Model: "m", Sources: []*kvcastv1.SourceSpec{{Connect: p.Endpoint(), Replay: p.ReplayEndpoint()}}}
			if _, err := servers[0].Operator().RegisterWorker(t.Context(), &kvcastv1.RegisterWorkerRequest{Worker: spec}); err != nil {
				t.Fatal(err)
			}
			if err := p.WaitSubscribed(harness.Context(t), 1); err != nil {
				t.Fatal(err)
			}
			blocks := uint32(0)
			goOn := func(servers ...*process) {
				t.Helper()
				publish(t, p, chainedBlock(uint64(blocks)))
				blocks++
				for _, s := range servers {
					awaitRank(t, s, kvcastv1.Trust_TRUST_EXACT, blocks)
				}
			}
			goOn(servers...)
			if err := js.DeleteStream(t.Context(), tt.stream); err != nil {
				t.Fatal(err)
			}
			if tt.error == "" {
				harness.WaitFor(t, func() bool {
					s, err := js.Stream(t.Context(), tt.stream)
					return err == nil && s.CachedInfo().State.Msgs == 1
				})
				goOn(servers...)
			}
			for _, s := range servers {
				if tt.error != "" {
					wantEnd(t, s.Process, tt.error)
				} else if s.End() != 0 {
					t.Error("a server ends with an error")
				}
			}
			s := begin()
			s.AwaitSample(`kvcast_ingest_publishers{state="live"} 1`)
			goOn(s)
		})
	}
}
