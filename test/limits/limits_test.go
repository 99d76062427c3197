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
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/harness"
)

const (
	// memory and milliCPUs are the limits of the container.
	memory    = 512 << 20
	milliCPUs = 500

	engines = 100
	// cacheBlocks is the size of each engine's cache, a little more than 1,000,000 blocks in all: not all of it is in use.
	cacheBlocks = 10_100
	wantBlocks  = 1_000_000
	// batches and rate make each engine fill its cache within 15 s.
	batches = 600
	rate    = 40
)

func TestMain(m *testing.M) { os.Exit(harness.RunTests(m)) }

// TestMemoryOfAServerInAContainer runs a server with the memory and the CPU time of its container, and with the default
// journal and index. The race detector changes both, so the test is among those that run without it.
func TestMemoryOfAServerInAContainer(t *testing.T) {
	testclass.WithoutRace(t)
	testclass.Process(t)
	checkManifest(t)
	container := newContainer(t)
	port := harness.FreePort(t)
	server, err := harness.StartProcess(harness.ProcessConfig{
		Wrapper: container.wrapper(),
		Args:    []string{"--bind", fmt.Sprintf("tcp://127.0.0.1:%d,replay_port=0", port)},
	})
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
	if want := fmt.Sprintf("memory=%d", memory*9/10); !strings.HasPrefix(limits, want+" ") {
		t.Errorf("limits of the Go runtime: got %s, want %s, nine tenths of the container's memory", limits, want)
	}
	startEngines(t, port)

	// Beside other tests, the container gets little CPU time, of which each scrape takes some.
	poll := time.NewTicker(500 * time.Millisecond)
	defer poll.Stop()
	filling, cancel := context.WithTimeout(t.Context(), 4*harness.Timeout)
	defer cancel()
	var blocks float64
	for blocks < wantBlocks {
		<-poll.C
		m, err := server.Metrics(filling)
		if err != nil {
			t.Fatalf("wait for %d blocks: %v; there are %.0f", wantBlocks, err, blocks)
		}
		blocks = m.Sum("kvcast_index_blocks")
	}

	ctx := harness.Context(t)
	addr, err := server.Addr()
	if err != nil {
		t.Fatal(err)
	}
	router, err := client.New(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	view, followed := client.NewView(), make(chan error, 1)
	go func() { followed <- view.Follow(router.Subscribe(ctx, client.Config{})) }()
	if err := view.WaitReady(ctx); err != nil {
		t.Errorf("read a snapshot: %v", err)
	}

	peak, err := harness.PeakResidentBytes(server.PID())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d engines, %.0f blocks and a snapshot: %d MiB at most, %s", engines, blocks, peak>>20, container.description)
	if peak >= memory {
		t.Errorf("the server used %d MiB, want less than %d MiB", peak>>20, memory>>20)
	}
}

// startEngines starts a program that simulates the engines, which ends with the test.
func startEngines(t *testing.T, port int) {
	t.Helper()
	program, err := harness.Program(false)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), program, "--end-with-stdin", "simulate", "--connect", fmt.Sprintf("tcp://127.0.0.1:%d", port),
		"--engines", fmt.Sprint(engines), "--blocks", fmt.Sprint(cacheBlocks), "--batches", fmt.Sprint(batches), "--rate", fmt.Sprint(rate),
		"--wait", "--stay", "--progress", "0")
	if _, err := cmd.StdinPipe(); err != nil { // open until this process ends
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Wait() }) // the test's context has ended it
}

// checkManifest checks that the limits tested here are those of the manifest.
func checkManifest(t *testing.T) {
	t.Helper()
	manifest, err := os.ReadFile(filepath.Join("..", "..", "deploy", "manifests", "zmq-listener", "listener.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("limits: {memory: %dMi, cpu: %dm}", memory>>20, milliCPUs)
	if !strings.Contains(string(manifest), want) {
		t.Errorf("listener.yaml has other limits than this test: want %s", want)
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
