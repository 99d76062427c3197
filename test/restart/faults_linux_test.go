package restart_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/faultfs"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
)

var faultPoints = flag.Int("faults", testclass.Size(4, 100), "number of operations at which a fault is injected, of each test")

const (
	faultEngines = 2
	// faultRate is the rate of each engine, in batches a second, while it publishes turnBatches. Then the router receives
	// them. So what the router lacks is never more than the server keeps, however slow that is.
	faultRate, turnBatches = 100, 15
	// faultPool and faultPrompts are the size of an engine's pool and the least length of a prompt, in blocks: few entries
	// fill the journal.
	faultPool, faultPrompts = 2048, 130
)

// runEntries is the number of entries of the first run of the server, which writes more than it may keep, and of each later
// one.
var runEntries = [2]uint64{800, 100}

// endTime is the maximum time in which a server that has ended is noticed.
const endTime = harness.Timeout

// class is operations that are alike: of one kind, on files with names that differ in digits only.
type class struct {
	run  int // of the server: 0 begins with an empty directory
	name string
}

var digits = regexp.MustCompile(`\d+`)

// point is an operation at which something happens: the nth of its class.
type point struct {
	class
	nth   int
	fault faultfs.Fault
}

func (p point) String() string {
	what := unix.ErrnoName(p.fault.Errno)
	if p.fault.Kill {
		what = "kill"
	}
	if p.fault.Wrote > 0 && strings.HasPrefix(p.name, string(faultfs.Write)) {
		what = "torn, " + what
	}
	return fmt.Sprintf("run %d, %s at %s %d", p.run, what, strings.ReplaceAll(p.name, "/", "|"), p.nth)
}

// operations counts the operations of each class, and injects the fault of a point.
type operations struct {
	mu      sync.Mutex // guards all below
	run     int
	counts  map[class]int
	point   *point
	reached bool // the fault was injected
	dead    bool // the server was killed: nothing that it still asked for happens
}

func (o *operations) decide(op faultfs.Op) faultfs.Fault {
	if op.Kind == faultfs.Write && (strings.HasPrefix(op.Path, "kvcast.position") || strings.HasSuffix(op.Path, "/deleted")) {
		// It is mapped: the kernel writes it when it likes, also after the server was killed, or when the file was replaced.
		return faultfs.Fault{}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	c := class{o.run, string(op.Kind) + " " + digits.ReplaceAllString(op.Path, "N")}
	o.counts[c]++
	switch {
	case o.dead:
		return faultfs.Fault{Errno: syscall.EIO}
	case o.point == nil || o.point.class != c || o.point.nth != o.counts[c]:
		return faultfs.Fault{}
	}
	o.reached = true
	o.dead = o.point.fault.Kill
	f := o.point.fault
	if f.Wrote > 0 {
		f.Wrote = max(1, op.Bytes/2)
	}
	return f
}

func (o *operations) isReached() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.reached
}

// end ends the faults, and reports whether one was injected.
func (o *operations) end() (reached bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.point, o.dead = nil, false
	return o.reached
}

func (o *operations) next() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.run++
}

// Outcomes of a run.
var (
	errEnded    = errors.New("the server has ended")
	errNotReady = errors.New("the server is not ready")
)

// history is two runs of a server on a file system with faults, and its engines and router.
type history struct {
	*server
	fs      *faultfs.FS
	engines *fleet.Fleet
	point   point
	ops     *operations
}

func newHistory(t *testing.T, p point, flags ...string) *history {
	t.Helper()
	fs := faultfs.Mount(t, t.TempDir())
	h := &history{fs: fs, engines: fleet.New(t, *seed), point: p, ops: &operations{counts: make(map[class]int), point: &p}}
	fs.OnOp(h.ops.decide)
	h.engines.Rate, h.engines.Pool, h.engines.Prompts, h.engines.Faults = faultRate, faultPool, faultPrompts, nil
	for i := range faultEngines {
		flags = append(flags, "--worker", h.engines.Add(fmt.Sprintf("engine-%d", i), 0, fleet.Bound()).Flag())
	}
	h.engines.Pause()
	h.server = newServerIn(t, fs.Dir(), "1MiB", flags...)
	return h
}

// play starts the server, and stops it when it has written entries. It returns errEnded or errNotReady if it does not come
// to that. The engines are paused then.
func (h *history) play() error {
	h.Launch(h.t)
	ctx, cancel := context.WithCancelCause(h.t.Context())
	watched := make(chan error, 1)
	go func() {
		err := h.watch(ctx)
		cancel(err)
		watched <- err
	}()
	err := h.write(ctx)
	if err == nil {
		cancel(nil)
		if err = h.Process.Stop(); err != nil && !strings.Contains(err.Error(), "did not exit") {
			err = fmt.Errorf("%w: %w", errEnded, err)
		}
	}
	select {
	case cause := <-watched:
		if err != nil && cause != nil {
			return cause
		}
	case <-time.After(endTime):
		cancel(nil)
		<-watched
	}
	return err
}

// write makes the server write entries, and waits until the router has what the engines hold.
func (h *history) write(ctx context.Context) error {
	addr, err := h.Process.Addr()
	if err != nil {
		return err
	}
	h.Proxy.Retarget(addr)
	target := h.router.Seq() + runEntries[min(h.ops.run, 1)]
	for complete := false; err == nil && !complete; {
		err = h.router.Converge(ctx, h.engines.Publish(turnBatches))
		complete = h.router.Seq() >= target && (h.ops.isReached() || h.isCompacted(ctx))
	}
	return err
}

// isCompacted reports whether the server has written a checkpoint in this run, and has evicted entries.
func (h *history) isCompacted(ctx context.Context) bool {
	m, err := h.Process.Metrics(ctx)
	return err == nil && m.Sum("kvcast_checkpoint_bytes_total") > 0 && m.Sum("kvcast_server_journal_oldest_seq") > 1
}

// watch waits until a server has ended, or is not ready any more and says that it is because of the fault, or ctx ends.
func (h *history) watch(ctx context.Context) error {
	p := h.Process
	if _, err := p.Admin(); err != nil {
		<-p.Ended()
		return errEnded
	}
	poll := time.NewTicker(50 * time.Millisecond)
	defer poll.Stop()
	for {
		_, err := p.Get(ctx, "/readyz")
		select {
		case <-p.Ended():
			return errEnded
		case <-ctx.Done():
			return nil
		case <-poll.C:
		}
		if err != nil && strings.Contains(err.Error(), "503") && h.namesFault() {
			return errNotReady
		}
	}
}

// namesFault reports whether the server has logged the error of the fault.
func (h *history) namesFault() bool {
	return slices.ContainsFunc(h.Process.Log(), func(line string) bool {
		return strings.Contains(line, h.point.fault.Errno.Error()) ||
			strings.Contains(line, "storage directory is not writable") || // nats-server does not say why
			strings.Contains(line, "which can follow an error of its files") // nor here
	})
}

// enumerate plays two runs without a fault, and returns how often each class of operations occurs.
func enumerate(t *testing.T, flags ...string) map[class]int {
	t.Helper()
	h := newHistory(t, point{}, flags...)
	for range 2 {
		if err := h.play(); err != nil {
			t.Fatalf("%v\n%s", err, strings.Join(h.Process.Log(), "\n"))
		}
		h.ops.next()
	}
	return h.ops.counts
}

// perClass is the number of operations of a class that are chosen from, between the first and the last.
const perClass = 4

// choose returns a random choice of points of all classes, as many as -faults says.
func choose(t *testing.T, counts map[class]int, faults ...faultfs.Fault) []point {
	var points []point
	for c, count := range counts {
		for i := range min(count, perClass) {
			for _, f := range faults {
				if !f.Kill && c.run > 0 && strings.Contains(c.name, "streams/") && strings.Contains(c.name, "_test_") && i > 0 {
					continue // nats-server deletes the stream if it cannot create this file: the loss is reported
				}
				if !f.Kill || f.Wrote == 0 || strings.HasPrefix(c.name, string(faultfs.Write)) {
					points = append(points, point{class: c, nth: 1 + i*count/min(count, perClass), fault: f})
				}
			}
		}
	}
	slices.SortFunc(points, func(a, b point) int { return strings.Compare(a.String(), b.String()) })
	rng := rand.New(rand.NewPCG(*seed, 2))
	rng.Shuffle(len(points), func(i, j int) { points[i], points[j] = points[j], points[i] })
	chosen := points[:min(len(points), *faultPoints)]
	t.Logf("seed %d: %d of %d points", *seed, len(chosen), len(points))
	return chosen
}

// survive plays a history with a fault, and after it a run without faults, which must have all that the engines hold. It
// returns the outcome of the run with the fault.
func survive(t *testing.T, p point, flags ...string) (reached bool, outcome error) {
	t.Helper()
	h := newHistory(t, p, flags...)
	for outcome == nil && h.ops.run <= p.run {
		outcome = h.play()
		if outcome == nil {
			h.ops.next()
		}
	}
	reached = h.ops.end()
	if outcome != nil && !errors.Is(outcome, errEnded) && !errors.Is(outcome, errNotReady) {
		t.Fatalf("%v: %v\n%s", p, outcome, strings.Join(h.Process.Log(), "\n"))
	}
	if err := h.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	lines := h.Process.Log()
	if outcome != nil && !p.fault.Kill && !h.namesFault() {
		t.Errorf("%v: %v, and no line names the fault:\n%s", p, outcome, strings.Join(lines, "\n"))
	}
	if err := h.play(); err != nil {
		t.Errorf("%v: after %v: %v\n%s", p, outcome, err, strings.Join(slices.Concat(lines, h.Process.Log()), "\n"))
	}
	return reached, outcome
}

// everywhere injects faults at points, in parallel.
func everywhere(t *testing.T, points []point, flags ...string) {
	t.Helper()
	var mu sync.Mutex
	outcomes, hits := make(map[string]int), 0
	// A test keeps what the cleanups of its parallel tests refer to until it ends: some 20 MiB of each.
	for group := range slices.Chunk(points, 20) {
		t.Run("points", func(t *testing.T) {
			for _, p := range group {
				t.Run(p.String(), func(t *testing.T) {
					t.Parallel()
					reached, outcome := survive(t, p, flags...)
					mu.Lock()
					defer mu.Unlock()
					outcomes[fmt.Sprintf("reached: %t, outcome: %v", reached, outcome)]++
					if reached {
						hits++
					}
					t.Logf("reached: %t, outcome: %v", reached, outcome)
				})
			}
		})
	}
	if hits == 0 {
		t.Error("no point was reached")
	}
	t.Logf("%d points: %v", len(points), outcomes)
}

func TestFaultsAtSingleOperationsLoseNothing(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	everywhere(t, choose(t, enumerate(t), faultfs.Fault{Errno: syscall.EIO}, faultfs.Fault{Errno: syscall.ENOSPC, Wrote: 1}))
}

func TestKillsAtSingleOperationsLoseNothing(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	everywhere(t, choose(t, enumerate(t), faultfs.Fault{Kill: true}, faultfs.Fault{Kill: true, Wrote: 1}))
}

// TestStateSurvivesACrashOfTheMachine takes from the files of the entries what was not synced, as a crash of the machine may,
// and leaves the checkpoints, which must not be newer.
func TestStateSurvivesACrashOfTheMachine(t *testing.T) {
	testclass.Process(t)
	for interval, continues := range map[string]bool{"always": true, "1h": false} {
		t.Run("sync "+interval, func(t *testing.T) {
			t.Parallel()
			crashMachine(t, interval, continues)
		})
	}
}

// crashMachine crashes a machine with a server that syncs at an interval. Its epoch continues, or another one begins.
func crashMachine(t *testing.T, interval string, continues bool) {
	t.Helper()
	wrapper := anotherBoot(t)
	h := newHistory(t, point{}, "--journal-sync", interval, "--journal-max-bytes", "16MiB", "--journal-checkpoint-bytes", "512KiB")
	var mu sync.Mutex
	synced := make(map[string]int64) // sizes
	h.fs.OnOp(func(op faultfs.Op) faultfs.Fault {
		mu.Lock()
		defer mu.Unlock()
		switch info, err := os.Stat(filepath.Join(h.fs.Files(), op.Path)); {
		case op.Kind == faultfs.Rename && continues:
			synced[op.Path] = math.MaxInt64 // nats-server has written the file with O_SYNC
		case op.Kind == faultfs.Rename:
			delete(synced, op.Path)
		case op.Kind == faultfs.Fsync && err == nil:
			synced[op.Path] = info.Size()
		}
		return faultfs.Fault{}
	})
	h.Launch(t)
	h.Proxy.Retarget(fleet.Address(t, h.Process))
	var states map[string]client.BlocksDigest
	for turns := 0; turns < 2; { // one with a checkpoint, and one after it
		states = h.engines.Publish(turnBatches)
		if err := h.router.Converge(t.Context(), states); err != nil {
			t.Fatal(err)
		}
		m, err := h.Process.Metrics(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if m.Sum("kvcast_checkpoint_bytes_total") > 0 {
			turns++
		}
	}
	h.end()
	epoch := h.router.Epoch()
	lost := int64(0)
	for _, name := range blocks(t, h.fs.Files(), "kvcast") {
		info, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		path, err := filepath.Rel(h.fs.Files(), name)
		if err != nil {
			t.Fatal(err)
		}
		mu.Lock()
		kept := min(info.Size(), synced[path])
		mu.Unlock()
		lost += info.Size() - kept
		err = os.Truncate(name, kept)
		if err != nil {
			t.Fatal(err)
		}
	}
	if t.Logf("%d bytes are lost", lost); lost > 0 && continues {
		t.Errorf("%d bytes were not synced", lost)
	}
	tear := &tear{dir: h.fs.Dir(), args: h.Args[2:], epoch: epoch, states: states} // without the journal
	if got, log := tear.restart(t, wrapper...); (got == epoch) != continues || strings.Contains(log, "level=ERROR") {
		t.Errorf("got epoch %s after %s\n%s", got, epoch, log)
	}
}
