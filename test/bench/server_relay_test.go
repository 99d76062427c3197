//go:build cgo

package bench_test

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	// relayPairs is the minimum number of pairs of BenchmarkServerToRelay.
	relayPairs = 5
	// relayBlocks is the number of blocks that each part of a pair stores: as many as fill an engine once.
	relayBlocks = poolBlocks
	// relaySubscribers is the number of subscribers.
	relaySubscribers = 8
)

// BenchmarkServerToRelay compares the server with a bareRelay: the same batches, subscribers and core, in turns. Each
// turn fills one engine of 1,048,576 blocks: 65,536 B1 batches, or 1,048,576 B2 batches. b.N is pairs of turns, with a
// minimum of relayPairs.
//
// server-cpu-ns/batch and relay-cpu-ns/batch are medians of the turns, of the whole process as in BenchmarkServer;
// server/relay is their ratio. min-ratio and max-ratio are those of single pairs.
//
// Check: as in BenchmarkServer, for both.
func BenchmarkServerToRelay(b *testing.B) {
	requireOneCore(b)
	for _, s := range storeShapes {
		benchmarkWith(b, s.name, func() (*serverAndRelay, error) { return openServerAndRelay(s.shape) },
			func(b *testing.B, r *serverAndRelay) {
				batches := relayBlocks / s.shape.blocks
				var server, relay []turn
				b.ResetTimer()
				for range max(b.N, relayPairs) {
					t, err := r.server.turn(batches)
					if err != nil {
						b.Fatal(err)
					}
					server = append(server, t)
					if t, err = r.relay.turn(batches); err != nil {
						b.Fatal(err)
					}
					relay = append(relay, t)
				}
				b.StopTimer()
				ratios := make([]float64, len(server))
				for i := range ratios {
					ratios[i] = float64(server[i].cpu) / float64(relay[i].cpu)
				}
				b.ReportMetric(slices.Min(ratios), "min-ratio")
				b.ReportMetric(slices.Max(ratios), "max-ratio")
				serverMedian, relayMedian := medianTurn(server), medianTurn(relay)
				n := float64(batches)
				b.ReportMetric(float64(serverMedian.cpu)/n, "server-cpu-ns/batch")
				b.ReportMetric(float64(relayMedian.cpu)/n, "relay-cpu-ns/batch")
				b.ReportMetric(n/serverMedian.responses, "server-entries/response")
				b.ReportMetric(n/relayMedian.responses, "relay-entries/response")
				b.ReportMetric(float64(serverMedian.cpu)/float64(relayMedian.cpu), "server/relay")
			})
	}
}

// turn is the resources that the server or the relay used in a turn.
type turn struct {
	cpu       time.Duration
	responses float64 // to each subscriber
}

// medianTurn returns the turn with the median CPU time.
func medianTurn(turns []turn) turn {
	sorted := slices.SortedFunc(slices.Values(turns), func(a, b turn) int { return cmp.Compare(a.cpu, b.cpu) })
	return sorted[len(sorted)/2]
}

// serverAndRelay are a server and a bareRelay.
type serverAndRelay struct {
	server *rig
	relay  *relayRig
}

func openServerAndRelay(s shape) (*serverAndRelay, error) {
	server, err := openServer(oneCore, s, relaySubscribers)
	if err != nil {
		return nil, err
	}
	relay, err := newRelayRig(oneCore, s, relaySubscribers)
	if err != nil {
		return nil, closeAfter(err, server)
	}
	if _, err := relay.turn(window); err != nil {
		return nil, closeAfter(err, &serverAndRelay{server, relay})
	}
	return &serverAndRelay{server, relay}, nil
}

// Close closes both.
func (r *serverAndRelay) Close() error { return closeAll(r.server, r.relay) }

// turn publishes n batches, and waits until the server has delivered them.
func (r *rig) turn(n int) (turn, error) {
	f, err := r.measure(func() error { return r.deliver(n) })
	return turn{f.cpu, f.grown[metricResponsesSent] / float64(len(r.subscribers))}, err
}

// deliver publishes n batches, and waits until all subscribers have received them.
func (r *rig) deliver(n int) error {
	if err := r.publish(n); err != nil {
		return err
	}
	return r.arrive()
}

// relayRig is a rig with a bareRelay instead of a server.
type relayRig struct {
	rig
	child *child
}

func newRelayRig(wrapper []string, s shape, subscribers int) (_ *relayRig, err error) {
	r := &relayRig{rig: rig{workers: 1, moved: make(chan struct{}, 1), load: newLoad(s)}}
	defer func() {
		if err != nil {
			err = closeAfter(fmt.Errorf("open relay: %w", err), r)
		}
	}()
	if r.publisher, err = newPublisher(); err != nil {
		return nil, err
	}
	if r.child, err = startWrappedChild(wrapper, "bare relay", childSetup{Address: r.publisher.endpoint}); err != nil {
		return nil, err
	}
	r.grpc = r.child.address
	if err = r.join(subscribers); err != nil {
		return nil, err
	}
	return r, nil
}

// turn publishes n batches, and waits until the relay has delivered them.
func (r *relayRig) turn(n int) (turn, error) {
	report, err := r.child.measure(n, func() error { return r.deliver(n) })
	return turn{report.CPU, float64(report.Moved)}, err
}

// Close closes the parts in order of dependency.
func (r *relayRig) Close() error {
	var closers []io.Closer
	for _, s := range r.subscribers {
		closers = append(closers, s)
	}
	if r.child != nil {
		closers = append(closers, r.child)
	}
	if r.publisher != nil {
		closers = append(closers, r.publisher)
	}
	return closeAll(closers...)
}

// TestRelayDeliversWhatTheServerDelivers compares the entries of a server and of a bareRelay, except for their times.
func TestRelayDeliversWhatTheServerDelivers(t *testing.T) {
	testclass.Process(t)
	requireProc(t)
	for _, s := range storeShapes {
		server, err := newRig(s.shape, 1)
		if err != nil {
			t.Fatal(err)
		}
		relay, err := newRelayRig(nil, s.shape, 1)
		if err != nil {
			t.Fatal(err)
		}
		var entries [2][]*kvcastv1.Entry
		for i, r := range []*rig{server, &relay.rig} {
			if _, err := r.subscribe(func(raw []byte, _ time.Time) error {
				var m kvcastv1.SubscribeResponse
				err := proto.Unmarshal(raw, &m)
				entries[i] = append(entries[i], m.GetEntries()...)
				return err
			}); err != nil {
				t.Fatal(err)
			}
		}
		const n = 2*batchMessages + 7
		if _, err := server.turn(n); err != nil {
			t.Fatal(err)
		}
		if got, err := relay.turn(n); err != nil || got.cpu <= 0 || got.responses <= 0 {
			t.Fatalf("relay: %+v, %v", got, err)
		}
		if err := closeAll(server, relay); err != nil { // the subscribers have ended
			t.Fatal(err)
		}
		for i, e := range entries[0] {
			e.EngineTimeUnixNano, e.IngestTimeUnixNano = 0, 0
			got := entries[1][i]
			if got.GetEngineTimeUnixNano() == 0 || got.GetIngestTimeUnixNano() == 0 {
				t.Fatalf("%s: entry %d has no times", s.name, i)
			}
			got.EngineTimeUnixNano, got.IngestTimeUnixNano = 0, 0
			if !proto.Equal(e, got) {
				t.Fatalf("%s: entry %d is %v, want %v", s.name, i, got, e)
			}
		}
		if len(entries[0]) != n || len(entries[1]) != n {
			t.Errorf("%s: %d and %d entries, want %d", s.name, len(entries[0]), len(entries[1]), n)
		}
	}
}
