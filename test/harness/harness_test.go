package harness_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"regexp"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/test/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.RunTests(m)) }

func TestMetrics(t *testing.T) {
	registry := prometheus.NewRegistry()
	counter := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "c_total", Help: "c"}, []string{"a", "b"})
	histogram := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "h_seconds", Help: "h"})
	registry.MustRegister(counter, histogram)
	counter.WithLabelValues("1", `"x"`).Add(2)
	counter.WithLabelValues("2", "y").Add(3)
	histogram.Observe(7)
	m := harness.Gather(t, registry)
	if got := m.Sum("c_total"); got != 5 {
		t.Errorf("sum: got %v, want 5", got)
	}
	if got := m.Value(t, "c_total", "a", "1", "b", `"x"`); got != 2 {
		t.Errorf("value: got %v, want 2", got)
	}
	if d := cmp.Diff(map[string]float64{"1": 2, "2": 3}, m.By("c_total", "a")); d != "" {
		t.Errorf("by label (-want +got):\n%s", d)
	}
	if got := m.Value(t, "h_seconds"); got != 1 {
		t.Errorf("histogram: got %v, want its count of 1", got)
	}
	if got := m[0].String(); got != `c_total{a="1",b="\"x\""}` {
		t.Errorf("got %s", got)
	}
}

// echo starts an echo server, and returns its address.
func echo(t *testing.T) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			}()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	return l.Addr().String()
}

// call sends a byte, and reports whether it is echoed in time.
func call(t *testing.T, c net.Conn, wait time.Duration) bool {
	t.Helper()
	if _, err := c.Write([]byte{1}); err != nil {
		return false
	}
	if err := c.SetReadDeadline(time.Now().Add(wait)); err != nil {
		t.Fatal(err)
	}
	_, err := io.ReadFull(c, make([]byte, 1))
	return err == nil
}

func TestProxy(t *testing.T) {
	const short = 20 * time.Millisecond // how long to wait for an echo that must not come
	p := harness.NewProxy(t, echo(t))
	dial := func() net.Conn {
		t.Helper()
		c, err := new(net.Dialer).DialContext(t.Context(), "tcp", p.Addr())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	first := dial()
	if !call(t, first, harness.Timeout) {
		t.Fatal("the proxy does not forward")
	}
	p.Freeze()
	if call(t, first, short) {
		t.Error("a frozen connection carries data")
	}
	second := dial()
	if !call(t, second, harness.Timeout) {
		t.Error("a connection after Freeze carries no data")
	}
	p.Partition()
	third := dial()
	if call(t, second, short) || call(t, third, short) {
		t.Error("a partitioned connection carries data")
	}
	p.Heal()
	if call(t, second, short) {
		t.Error("a connection opened before the partition carries data")
	}
	if !call(t, third, harness.Timeout) {
		t.Error("a connection opened during the partition carries no data after it")
	}
	if got, want := p.Stats(), (harness.ProxyStats{Accepted: 3, Alive: 1, Frozen: 2}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	p.Cut()
	if err := third.SetReadDeadline(time.Now().Add(harness.Timeout)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, third); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a connection that was cut stays open")
	}
	p.Retarget("")
	if call(t, dial(), harness.Timeout) {
		t.Error("a proxy without a target forwards")
	}
}

// TestPortsAreFreeBesideStartingProcesses allocates ports while processes start, which have the listeners of this one open at first.
func TestPortsAreFreeBesideStartingProcesses(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			for ctx.Err() == nil {
				if err := exec.CommandContext(ctx, os.Args[0], "-test.run=^$").Run(); err != nil && ctx.Err() == nil {
					t.Errorf("start a process: %v", err)
					return
				}
			}
		})
	}
	defer group.Wait()
	defer cancel()
	for range 500 {
		l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: harness.FreePort(t)})
		if err != nil {
			t.Fatal(err)
		}
		_ = l.Close()
	}
}

func TestProcessServesAndStops(t *testing.T) {
	p, err := harness.StartProcess(harness.ProcessConfig{Args: []string{"--bind", "tcp://127.0.0.1:*"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Addr(); err != nil {
		t.Fatal(err)
	}
	if m, err := p.Metrics(t.Context()); err != nil || len(m.Select("kvcast_server_journal_newest_seq")) != 1 {
		t.Errorf("got %d samples and error %v, want those of the server", len(m), err)
	}
	for range 2 {
		if err := p.Stop(); err != nil || p.ExitStatus() != 0 {
			t.Errorf("stop: status %d, error %v", p.ExitStatus(), err)
		}
	}
	if _, err := p.Logged(regexp.MustCompile("never logged")); err == nil {
		t.Error("a line that was never logged is found")
	}
	if faults := p.LogFaults(); len(faults) > 0 {
		t.Errorf("log: %q", faults)
	}
}

func TestProcessThatFailsIsReported(t *testing.T) {
	p, err := harness.StartProcess(harness.ProcessConfig{Args: []string{"--no-such-flag"}})
	if err != nil {
		t.Fatal(err)
	}
	if addr, err := p.Addr(); err == nil {
		t.Errorf("got address %s, want an error", addr)
	}
	if err := p.Stop(); err == nil || p.ExitStatus() == 0 || len(p.LogFaults()) == 0 {
		t.Errorf("stop: status %d, error %v, log %q", p.ExitStatus(), err, p.LogFaults())
	}
}

func TestCPUTimeOfProcess(t *testing.T) {
	own := func() time.Duration {
		var r syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
			t.Fatal(err)
		}
		return time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	before, err := harness.CPUTime(os.Getpid())
	if err != nil {
		t.Skipf("skipped: CPUTime requires /proc: %v", err)
	}
	began := own()
	for own()-began < 5*harness.CPUTick {
	}
	after, err := harness.CPUTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if got, most := after-before, own()-began+2*harness.CPUTick; got < 3*harness.CPUTick || got > most {
		t.Errorf("got %v, want %v to %v", got, 3*harness.CPUTick, most)
	}
	rss, err := harness.ResidentBytes(os.Getpid())
	if err != nil || rss < 1<<20 || rss > 8<<30 {
		t.Errorf("got %d bytes of memory, error %v", rss, err)
	}
	threads, err := harness.Threads(os.Getpid())
	if err != nil || threads < 2 {
		t.Errorf("got %d threads, error %v", threads, err)
	}
	all, sockets, err := harness.Descriptors(os.Getpid())
	if err != nil || all < 3 || sockets > all {
		t.Errorf("got %d descriptors, %d sockets, error %v", all, sockets, err)
	}
}
