package bench_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

const (
	scaleWorkers     = 1000
	scaleSubscribers = 256
	// scaleEngines is the maximum number of engines that one process simulates.
	scaleEngines = 250
	// scaleRate is the rate of each engine in batches per second.
	scaleRate = 0.2
	// scaleClients is more than the engines and subscribers, which all have one address.
	scaleClients = "4000"
	// scaleSeconds covers at least two batches of each engine.
	scaleSeconds = 11
)

// BenchmarkScale measures one server with 1,000 simulated engines that connect to it, each
// publishing one batch every five seconds, and 256 unfiltered subscribers: about 50,000 deliveries
// per second. Deliveries come in bursts because the engines of one process publish at the same
// time. b.N is seconds, with a minimum of scaleSeconds.
//
// server-cpu-s/s (CPU seconds per second) and rss-MB cover the server process only. Excluded: the
// engines and the subscribers.
//
// Check: all workers are present, and the positions of each subscriber's responses chain.
func BenchmarkScale(b *testing.B) {
	requireProc(b)
	benchmarkWith(b, fmt.Sprintf("%dx%d", scaleSubscribers, scaleWorkers), func() (*scale, error) { return openScale(scaleWorkers, scaleSubscribers, scaleRate) },
		func(b *testing.B, s *scale) {
			seconds := max(b.N, scaleSeconds)
			b.ResetTimer()
			before, cpu, err := s.reading()
			if err != nil {
				b.Fatal(err)
			}
			<-time.After(time.Duration(seconds) * time.Second)
			after, cpuAfter, err := s.reading()
			b.StopTimer()
			for _, sub := range s.subscribers {
				err = errors.Join(err, sub.ended())
			}
			if err != nil {
				b.Fatal(err)
			}
			rss, err := s.server.residentBytes()
			if err != nil {
				b.Fatal(err)
			}
			grown := after.since(before)
			b.ReportMetric((cpuAfter-cpu).Seconds()/float64(seconds), "server-cpu-s/s")
			b.ReportMetric(grown[metricEntriesSent]/float64(seconds), "deliveries/s")
			b.ReportMetric(float64((cpuAfter-cpu).Nanoseconds())/grown[metricEntriesSent], "server-cpu-ns/delivery")
			b.ReportMetric(grown[metricEntriesSent]/grown[metricResponsesSent], "entries/response")
			b.ReportMetric(float64(rss)/1e6, "rss-MB")
		})
}

// scale is a server with its engines, which connect to it, and its subscribers.
type scale struct {
	server      *process
	engines     []*engines
	subscribers []*subscriber
}

// openScale returns once all workers are present. rate is that of each engine in batches per second.
func openScale(workers, subscribers int, rate float64) (_ *scale, err error) {
	s := new(scale)
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	port, err := harness.AllocatePorts(1)
	if err != nil {
		return nil, err
	}
	endpoint := fmt.Sprintf("tcp://127.0.0.1:%d", port)
	// Without replay, startup does not wait for replays, which are limited in number at a time.
	if s.server, err = serve(nil, "--bind", endpoint+",replay_port=0",
		"--ingest-max-sources-per-address", scaleClients, "--ingest-max-connections-per-address", scaleClients,
		"--subscribers-max-connections-per-address", scaleClients); err != nil {
		return nil, err
	}
	for n := 0; n < workers; n += scaleEngines {
		e, err := simulateEngines(endpoint, fmt.Sprintf("p%d", n), min(scaleEngines, workers-n), rate)
		if err != nil {
			return nil, err
		}
		s.engines = append(s.engines, e)
	}
	moved := make(chan struct{}, 1)
	for range subscribers {
		sub, err := subscribe(s.server.grpc, fromLatest(), moved, nil)
		if err != nil {
			return nil, err
		}
		s.subscribers = append(s.subscribers, sub)
	}
	for deadline := time.Now().Add(time.Minute); ; {
		status, err := kvcastv1.NewRouterEventServiceClient(s.subscribers[0].conn).GetStatus(context.Background(), &kvcastv1.GetStatusRequest{})
		if err != nil {
			return nil, fmt.Errorf("open scale: %w", err)
		}
		if status.GetWorkers() == uint64(workers) {
			return s, nil
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("open scale: %d workers, want %d", status.GetWorkers(), workers)
		}
		<-time.After(100 * time.Millisecond)
	}
}

func (s *scale) reading() (metrics, time.Duration, error) {
	m, err := s.server.metrics(context.Background())
	if err != nil {
		return nil, 0, err
	}
	cpu, err := s.server.cpu()
	return m, cpu, err
}

// Close closes all parts.
func (s *scale) Close() error {
	var closers []io.Closer
	for _, sub := range s.subscribers {
		closers = append(closers, sub)
	}
	for _, e := range s.engines {
		closers = append(closers, e)
	}
	if s.server != nil {
		closers = append(closers, s.server)
	}
	return closeAll(closers...)
}

// engines is a process that simulates several engines.
type engines struct {
	cmd *exec.Cmd
	in  io.Closer
}

func simulateEngines(endpoint, name string, n int, rate float64) (*engines, error) {
	path, err := harness.Program(false)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(context.Background(), path, "--end-with-stdin", "simulate", "--connect", endpoint, "--name", name,
		"--engines", fmt.Sprint(n), "--rate", fmt.Sprint(rate), "--progress", "0s")
	in, err := cmd.StdinPipe() // EOF ends the child when this process exits for any reason
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, fmt.Errorf("simulate engines: %w", err)
	}
	return &engines{cmd: cmd, in: in}, nil
}

// Close stops the process.
func (e *engines) Close() error {
	err := e.in.Close()
	_ = e.cmd.Wait() // the process was interrupted
	return err
}

// TestScaleStartsAllEngines runs with few engines and subscribers.
func TestScaleStartsAllEngines(t *testing.T) {
	testclass.Process(t)
	requireProc(t)
	s, err := openScale(3, 2, scaleRate)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
