// Package limits tests that kvcast serves what docs/operations.md says within the resources that
// deploy/manifests/zmq-listener/listener.yaml gives it.
package limits

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/transport/configured"
	"github.com/kvcast/kvcast/test/harness"
)

const (
	// memory is that of the manifest and of the chart. libzmqMemory is what docs/operations.md says for connections by libzmq.
	memory       = 512 << 20
	libzmqMemory = 1536 << 20

	engines = 100
	// cacheBlocks is the size of each engine's cache, a little more than 1,000,000 blocks in all: not all of it is in use.
	cacheBlocks = 10_100
	wantBlocks  = 1_000_000
	// rate, in batches a second, makes each engine fill its cache within 15 s.
	rate = 40

	// subscribers begin at the same time, each with a snapshot; some of them read nothing until the others are done. snapshots are those of further
	// clients at the same time.
	subscribers     = 50
	slowSubscribers = 10
	snapshots       = 20
	// wantEntries is how many entries each subscriber reads after the snapshots. The journal retains some 100,000.
	wantEntries = 15_000
	maxEntries  = 30_000
)

func TestMain(m *testing.M) { os.Exit(harness.RunTests(m)) }

// TestMemoryOfAServerInAContainer runs a server with the memory and the CPU time of its container, and with the default
// journal and index, until it has the blocks of all engines and many routers have read them. The race detector changes both, so the test is
// among those that run without it.
func TestMemoryOfAServerInAContainer(t *testing.T) {
	testclass.WithoutRace(t)
	testclass.Process(t)
	checkLimits(t)
	tests := []struct {
		name, transport string
		listens         bool
		memory          int64
	}{
		{"kvcast connects by itself", "native", false, memory},
		{"engines connect", "native", true, memory},
		{"kvcast connects by libzmq", "libzmq", false, libzmqMemory}, // in builds with cgo alone
	}
	if configured.LibzmqVersion() == "" {
		tests = tests[:2]
	}
	for _, tt := range tests[:min(len(tests), testclass.Size(1, len(tests)))] {
		t.Run(tt.name, func(t *testing.T) {
			c := newContainer(t, tt.memory)
			var from simulated
			if tt.listens {
				from = listening(t)
			} else {
				from = connecting(tt.transport)
			}
			// On a busy machine, the server may need minutes to send 70 snapshots with its CPU time: it ends none of them for that.
			server := startServer(t, c, append(from.server, "--subscribers-stall", "10m")...)
			simulator := startEngines(t, from.engines...)
			blocks := fill(t, server)
			addr, err := server.Addr()
			if err != nil {
				t.Fatal(err)
			}
			readAll(t, addr, simulator)
			resident, err := harness.PeakResidentBytes(server.PID())
			if err != nil {
				t.Fatalf("the server has ended: %v", err)
			}
			t.Logf("%d engines, %.0f blocks, %d subscribers (%d slow) and %d snapshots at a time: at most %d MiB resident, %d MiB of the container, %s",
				engines, blocks, subscribers, slowSubscribers, snapshots, resident>>20, c.peak(t)>>20, c.description)
			// What is resident includes the program's own pages, which the kernel takes back. In a cgroup, the server would have been killed.
			if c.peak(t) == 0 && resident >= tt.memory {
				t.Errorf("the server used %d MiB, want less than %d MiB", resident>>20, tt.memory>>20)
			}
		})
	}
}

// simulated is how a server and simulated engines find each other.
type simulated struct{ server, engines []string }

// listening are engines that connect to a port of the server.
func listening(t *testing.T) simulated {
	t.Helper()
	port := harness.FreePort(t)
	return simulated{
		[]string{"--bind", fmt.Sprintf("tcp://127.0.0.1:%d,replay_port=0", port)},
		[]string{"--connect", fmt.Sprintf("tcp://127.0.0.1:%d", port)},
	}
}

// connecting are engines that the server connects to, at an address of this process.
func connecting(transport string) simulated {
	const ports, replays = 20000, 21000
	host := fmt.Sprintf("127.8.%d.1", os.Getpid()%250)
	s := simulated{[]string{"--ingest-connect-transport", transport},
		[]string{"--bind", fmt.Sprintf("tcp://%s:%d", host, ports), "--replay", fmt.Sprintf("tcp://%s:%d", host, replays)}}
	for i := range engines {
		s.server = append(s.server, "--worker", fmt.Sprintf("name=engine-%d,connect=tcp://%s:%d,replay=tcp://%s:%d", i, host, ports+i, host, replays+i))
	}
	return s
}

func startServer(t *testing.T, c *container, args ...string) *harness.Process {
	t.Helper()
	server, err := harness.StartProcess(harness.ProcessConfig{Wrapper: c.wrapper(), Args: args})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	limits, err := server.Logged(regexp.MustCompile(`msg="limits of the Go runtime" (.*)`))
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("memory=%d", c.memory*9/10); !strings.HasPrefix(limits, want+" ") {
		t.Errorf("limits of the Go runtime: got %s, want %s, nine tenths of the container's memory", limits, want)
	}
	return server
}

// fill waits until the server has the blocks of all engines.
func fill(t *testing.T, server *harness.Process) (blocks float64) {
	t.Helper()
	// Beside other tests, the container gets little CPU time, of which each scrape takes some.
	poll := time.NewTicker(500 * time.Millisecond)
	defer poll.Stop()
	filling, cancel := context.WithTimeout(t.Context(), 4*harness.Timeout)
	defer cancel()
	for blocks < wantBlocks {
		<-poll.C
		m, err := server.Metrics(filling)
		if err != nil {
			t.Fatalf("wait for %d blocks: %v; there are %.0f", wantBlocks, err, blocks)
		}
		blocks = m.Sum("kvcast_index_blocks")
	}
	return blocks
}

// startEngines starts a program that simulates the engines, which ends with the test.
func startEngines(t *testing.T, args ...string) *os.Process {
	t.Helper()
	program, err := harness.Program(false)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), program, slices.Concat([]string{"--end-with-stdin", "simulate"}, args, []string{
		"--engines", fmt.Sprint(engines), "--blocks", fmt.Sprint(cacheBlocks), "--rate", fmt.Sprint(rate),
		"--wait", "--stay", "--progress", "0",
	})...)
	if _, err := cmd.StdinPipe(); err != nil { // open until this process ends
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Wait() }) // the test's context has ended it
	return cmd.Process
}

// checkLimits checks that the limits tested here are those of the manifest and of the chart.
func checkLimits(t *testing.T) {
	t.Helper()
	for file, want := range map[string]string{
		"manifests/zmq-listener/listener.yaml": fmt.Sprintf("limits: {memory: %dMi, cpu: %dm}", memory>>20, milliCPUs),
		"helm/kvcast/values.yaml":              fmt.Sprintf("limits: {cpu: %dm, memory: %dMi}", milliCPUs, memory>>20),
	} {
		text, err := os.ReadFile(filepath.Join("..", "..", "deploy", filepath.FromSlash(file)))
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), want) {
			t.Errorf("%s has other limits than this test: want %s", file, want)
		}
	}
}

func TestGOMEMLIMITOverridesTheContainer(t *testing.T) {
	testclass.Process(t)
	t.Setenv("GOMEMLIMIT", "300MiB")
	server, err := harness.StartProcess(harness.ProcessConfig{Args: []string{"--bind", "tcp://127.0.0.1:*"}})
	if err != nil {
		t.Fatal(err)
	}
	limits, err := server.Logged(regexp.MustCompile(`msg="limits of the Go runtime" (.*)`))
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("memory=%d ", 300<<20); !strings.HasPrefix(limits, want) {
		t.Errorf("limits of the Go runtime: got %s, want %s", limits, want)
	}
	if err := server.Stop(); err != nil {
		t.Error(err)
	}
}
