//go:build cgo

package bench_test

import (
	"context"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/kvcast/kvcast/test/harness"
)

const (
	// replicaSubscribers is the number of subscribers of each replica.
	replicaSubscribers = 32
	// replicaRate is the rate of the engine in batches per second.
	replicaRate = 500
	// replicaSeconds makes the error of a reading of CPU time (10 ms) small.
	replicaSeconds = 10
)

// BenchmarkReplicas measures servers that read no engine (replicas) and serve the stream of a server that reads one. Each
// replica has 32 subscribers, and the engine publishes 500 batches of 16 blocks per second. b.N is seconds, with a minimum
// of replicaSeconds.
//
// replica-cpu-s/s (CPU seconds per second) is the mean of the replicas. If it does not depend on their number, n replicas
// serve n times the subscribers of one. deliveries/s are those of all replicas together. Excluded: the NATS server, the
// publisher and the subscribers, which run in the benchmark's process, and the server that reads the engine.
//
// Check: every subscriber received one entry per batch, in responses whose positions chain, and no server reports a fault.
func BenchmarkReplicas(b *testing.B) {
	requireProc(b)
	url := harness.StartNATS(b)
	for _, n := range []int{1, 2, 4} {
		runs := 0
		open := func() (*replicas, error) {
			runs++
			return openReplicas(url, fmt.Sprintf("replicas-%d-%d", n, runs), n, replicaSubscribers)
		}
		benchmarkWith(b, fmt.Sprintf("%dx%d", n, replicaSubscribers), open, func(b *testing.B, r *replicas) {
			seconds := max(b.N, replicaSeconds)
			b.ResetTimer()
			cpu, deliveries, err := r.measure(seconds * replicaRate)
			b.StopTimer()
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(cpu.Seconds()/float64(n)/float64(seconds), "replica-cpu-s/s")
			b.ReportMetric(float64(cpu.Nanoseconds())/deliveries, "replica-cpu-ns/delivery")
			b.ReportMetric(deliveries/float64(seconds), "deliveries/s")
		})
	}
}

// replicas are servers that serve the stream of the rig's server, and all subscribers of the rig.
type replicas struct {
	rig       *rig
	processes []*process
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

// measure publishes batches at replicaRate until all subscribers have received them. It returns the CPU time and the
// deliveries of all replicas.
func (r *replicas) measure(batches int) (cpu time.Duration, deliveries float64, err error) {
	cpuBefore, sentBefore, err := r.reading()
	if err != nil {
		return 0, 0, err
	}
	_, err = r.rig.measure(func() error {
		if err := paced(batches, replicaRate, r.rig.send); err != nil {
			return err
		}
		return r.rig.arrive()
	})
	if err != nil {
		return 0, 0, err
	}
	cpu, sent, err := r.reading()
	if err != nil {
		return 0, 0, err
	}
	if want := float64(batches * len(r.rig.subscribers)); sent-sentBefore != want {
		return 0, 0, fmt.Errorf("check replicas: %.0f entries sent, want %.0f", sent-sentBefore, want)
	}
	return cpu - cpuBefore, sent - sentBefore, nil
}

// reading returns the CPU time of all replicas, and the entries that they have sent.
func (r *replicas) reading() (cpu time.Duration, sent float64, err error) {
	for _, p := range r.processes {
		used, err := p.cpu()
		if err != nil {
			return 0, 0, err
		}
		m, err := p.metrics(context.Background())
		if err == nil {
			err = m.faultless()
		}
		if err != nil {
			return 0, 0, err
		}
		cpu += used
		sent += m[metricEntriesSent]
	}
	return cpu, sent, nil
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

// TestReplicasDeliverEverything runs BenchmarkReplicas with few subscribers and batches.
func TestReplicasDeliverEverything(t *testing.T) {
	requireProc(t)
	r, err := openReplicas(harness.StartNATS(t), "replicas", 2, 2)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.measure(100); err != nil {
		t.Error(err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}
