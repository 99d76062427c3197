package client_test

import (
	"io"
	"runtime"
	"testing"
	"testing/synctest"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// TestReconnectsLeakNothing has a server that ends each stream after its first messages.
func TestReconnectsLeakNothing(t *testing.T) {
	testclass.WithoutRace(t)
	reconnects := testclass.Size(1000, 10_000)
	synctest.Test(t, func(t *testing.T) {
		s := play(t, script{messages: []*kvcastv1.SubscribeResponse{resumed(5), progress(5)}, err: io.EOF})
		usage := func() (goroutines int, heap uint64) {
			synctest.Wait()
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return runtime.NumGoroutine(), m.HeapAlloc
		}
		var (
			warmGoroutines int
			warmHeap       uint64
		)
		o := s.collect(t.Context(), client.Config{Start: client.After(client.Position{Epoch: "e", Seq: 5})}, func(o *outcome) bool {
			n := len(o.interruptions)
			if n == reconnects/10 && warmHeap == 0 {
				warmGoroutines, warmHeap = usage()
			}
			o.updates = nil // which the test would keep otherwise
			return n == reconnects
		})
		if o.err != nil {
			t.Fatal(o.err)
		}
		goroutines, heap := usage()
		// The test itself keeps the requests and interruptions, some 500 bytes a stream.
		if most := warmHeap + uint64(reconnects)*2048; goroutines > warmGoroutines+8 || heap > most {
			t.Errorf("after %d reconnects: %d goroutines and %d bytes, want at most %d and %d", reconnects, goroutines, heap, warmGoroutines+8, most)
		}
	})
}
