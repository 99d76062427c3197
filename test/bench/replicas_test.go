//go:build cgo

package bench_test

import (
	"context"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

const (
	// replicaSubscribers is the number of subscribers that are connected to each replica.
	replicaSubscribers = 32
	// replicaRate is the rate of the engine in batches per second.
	replicaRate = 500
	// replicaSeconds makes the error of a reading of CPU time (10 ms) small.
	replicaSeconds = 10
)

// BenchmarkServeOnly measures servers that read no engine (replicas) and serve the stream of a server that reads one. Each
// replica has 32 subscribers, and the engine publishes 500 batches of 16 blocks per second. b.N is seconds, with a minimum
// of replicaSeconds.
//
// replica-cpu-s/s (CPU seconds per second) is the mean of the replicas. If it does not depend on their number, n replicas
// serve n times the subscribers of one. deliveries/s are those of all replicas together. Excluded: the NATS server, the
// publisher and the subscribers, which run in the benchmark's process, and the server that reads the engine.
//
// Check: every subscriber received one entry per batch, in responses whose positions chain, and no server reports a fault.
func BenchmarkServeOnly(b *testing.B) {
	requireProc(b)
	url := natstest.Start(b)
	for _, n := range []int{1, 2, 4} {
		runs := 0
		open := func() (*replicas, error) {
			runs++
			return openReplicas(url, fmt.Sprintf("replicas-%d-%d", n, runs), n, replicaSubscribers)
		}
		benchmarkWith(b, fmt.Sprintf("%dx%d", n, replicaSubscribers), open, func(b *testing.B, r *replicas) {
			seconds := max(b.N, replicaSeconds)
			b.ResetTimer()
			used, err := r.measure(seconds * replicaRate)
			b.StopTimer()
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(used.cpu.Seconds()/float64(n)/float64(seconds), "replica-cpu-s/s")
			b.ReportMetric(float64(used.cpu.Nanoseconds())/used.entries, "replica-cpu-ns/delivery")
			b.ReportMetric(used.entries/float64(seconds), "deliveries/s")
			b.ReportMetric(used.entries/used.responses, "entries/response")
		})
	}
}

// replicas is a rig whose subscribers are connected to further servers, which serve the stream that the rig's server writes.
type replicas struct {
	rig       *rig
	processes []*process // the further servers
}

// openReplicas returns n replicas with the same number of subscribers each.
func openReplicas(url, stream string, n, subscribers int) (_ *replicas, err error) {
	r := new(replicas)
	defer func() {
		if err != nil {
			err = closeAfter(err, r)
		}
	}()
	args := []string{"--journal", url, "--journal-stream", stream}
	if r.rig, err = newRig(shapeB1, 0, args...); err != nil {
		return nil, err
	}
	// Until now the stream has WorkerAdded, and records of the servers' own.
	before, err := r.rig.server.metrics(context.Background())
	if err != nil {
		return nil, err
	}
	r.rig.others = uint64(before[metricNewest]) - 1
	for range n {
		p, err := serve(nil, append(args, "--cluster-ingest=false")...)
		if err != nil {
			return nil, err
		}
		r.processes = append(r.processes, p)
		r.rig.grpc = p.grpc
		for range subscribers {
			if _, err := r.rig.subscribe(nil); err != nil {
				return nil, err
			}
		}
	}
	return r, nil
}

// delivered is what all replicas together have sent, and the CPU time that they have used.
type delivered struct {
	cpu                time.Duration
	entries, responses float64
}

// measure publishes batches at replicaRate until all subscribers have received them.
func (r *replicas) measure(batches int) (delivered, error) {
	before, err := r.reading()
	if err != nil {
		return delivered{}, err
	}
	_, err = r.rig.measure(func() error {
		if err := paced(batches, replicaRate, r.rig.send); err != nil {
			return err
		}
		if err := r.rig.arrive(); err != nil {
			return err
		}
		return r.rig.arriveAtServer() // it also reads the stream, as the replicas do
	})
	if err != nil {
		return delivered{}, err
	}
	after, err := r.reading()
	if err != nil {
		return delivered{}, err
	}
	d := delivered{after.cpu - before.cpu, after.entries - before.entries, after.responses - before.responses}
	if want := float64(batches * len(r.rig.subscribers)); d.entries != want {
		return d, fmt.Errorf("check replicas: %.0f entries sent, want %.0f", d.entries, want)
	}
	return d, nil
}

// reading returns what the replicas have sent and used since they were started.
func (r *replicas) reading() (d delivered, err error) {
	for _, p := range r.processes {
		used, err := p.cpu()
		if err != nil {
			return d, err
		}
		m, err := p.metrics(context.Background())
		if err == nil {
			err = m.faultless()
		}
		if err != nil {
			return d, err
		}
		d.cpu += used
		d.entries += m[metricEntriesSent]
		d.responses += m[metricResponsesSent]
	}
	return d, nil
}

// Close closes the subscribers, the replicas, and the rig.
func (r *replicas) Close() error {
	var closers []io.Closer
	if r.rig != nil {
		for _, s := range r.rig.subscribers {
			closers = append(closers, s)
		}
		r.rig.subscribers = nil
	}
	for _, p := range r.processes {
		closers = append(closers, p)
	}
	if r.rig != nil {
		closers = append(closers, r.rig)
	}
	return closeAll(closers...)
}

// TestReplicasDeliverEverything runs BenchmarkServeOnly with few subscribers and batches.
func TestReplicasDeliverEverything(t *testing.T) {
	testclass.Process(t)
	requireProc(t)
	r, err := openReplicas(natstest.Start(t), "replicas", 2, 2)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.measure(100); err != nil {
		t.Error(err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}
