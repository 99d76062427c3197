package jetstream_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"testing"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
)

// TestKilledProcessLosesNothing kills a process that appends, several times, and checks that each acknowledged entry is
// there once, and that no other entry is between them.
func TestKilledProcessLosesNothing(t *testing.T) {
	const variable = "KVCAST_TEST_KILL"
	for _, always := range []bool{false, true} {
		name := fmt.Sprintf("sync_always_%t", always)
		t.Run(name, func(t *testing.T) {
			dir := os.Getenv(variable)
			child := dir != ""
			if !child {
				dir = t.TempDir() // a process that is killed would leave one behind
			}
			cfg := config(dir)
			cfg.SyncAlways = always
			if child {
				appendForEver(t, cfg)
			}
			j, _ := load(t, cfg)
			epoch := j.Bounds().Epoch
			mustClose(t, j)
			acknowledged := uint64(0)
			for range 3 {
				cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKilledProcessLosesNothing$/^"+name+"$")
				cmd.Env = append(os.Environ(), variable+"="+cfg.Dir)
				acknowledged = killAfter(t, cmd, acknowledged+500)
			}
			j, got := load(t, cfg)
			if b := j.Bounds(); b.Epoch != epoch {
				t.Errorf("epoch: got %s, want %s", b.Epoch, epoch)
			}
			wantOnce(t, got, uint64(len(got)))
			if uint64(len(got)) < acknowledged {
				t.Errorf("got %d entries, want %d", len(got), acknowledged)
			}
		})
	}
}

// appendForEver appends from four workers and prints each seq that is acknowledged. Entries are numbered a worker.
func appendForEver(t *testing.T, cfg jetstream.Config) {
	j, entries := load(t, cfg)
	next := make(map[string]int)
	for _, e := range entries {
		next[e.Worker]++
	}
	pending := make(chan journal.Pending, 1000)
	var wg sync.WaitGroup
	for i := range 4 {
		source := &journal.Source{Worker: fmt.Sprintf("w%d", i)}
		n := next[source.Worker]
		wg.Go(func() {
			for ; ; n++ {
				p, err := j.Append(context.Background(), journal.Record{Source: source, Body: []byte(strconv.Itoa(n))})
				if err != nil {
					panic(err)
				}
				pending <- p
			}
		})
	}
	for p := range pending {
		seq, err := p.Wait(context.Background())
		if err != nil {
			panic(err)
		}
		fmt.Println(seq)
	}
}

// killAfter runs a command until it has printed a number of at least n, kills it, and returns the largest number.
func killAfter(t *testing.T, cmd *exec.Cmd, n uint64) (largest uint64) {
	t.Helper()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines, killed := bufio.NewScanner(out), false
	for lines.Scan() {
		seq, err := strconv.ParseUint(lines.Text(), 10, 64)
		if err != nil {
			t.Errorf("the process printed %q", lines.Text())
		}
		largest = max(largest, seq)
		if !killed && largest >= n {
			killed = cmd.Process.Kill() == nil
		}
	}
	if err := cmd.Wait(); err == nil || !killed {
		t.Fatalf("the process ended by itself after %d: %v", largest, err)
	}
	return largest
}
