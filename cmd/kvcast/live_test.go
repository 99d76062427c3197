package main_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
	"github.com/kvcast/kvcast/test/harness"
)

const (
	// liveFolder contains Python and SGLang's publishers, as make live prepares them.
	liveFolder = "../../bin/live"
	liveRanks  = 2
	// liveGrace is the grace time of servers whose workers are to be removed.
	liveGrace = 4 * time.Second
	// livePatience bounds the time until a view equals the engine's blocks.
	livePatience = 2 * time.Minute
)

// liveTiers are SGLang's names of tiers.
var liveTiers = map[string]kvcastv1.Tier{
	"GPU": kvcastv1.Tier_TIER_DEVICE, "CPU_PINNED": kvcastv1.Tier_TIER_HOST_PINNED,
}

// livePublisher is a process that publishes with SGLang's code.
type livePublisher struct {
	t            *testing.T
	args         []string
	connects     bool
	incarnations int // number of starts
	cmd          *exec.Cmd
	stdin        *os.File
	out          *bufio.Reader
	log          *bytes.Buffer
}

// liveAnswer is an answer of the publisher process.
type liveAnswer struct {
	Ready bool
	Burst int
	// Held contains the blocks of each rank and medium.
	Held []map[string][]int64
}

// newLivePublisher starts one of SGLang's publishers, and returns the flags for kvcast. The publisher
// binds or, if connects is set, connects.
func newLivePublisher(t *testing.T, kvEvents string, connects bool) (p *livePublisher, flags []string) {
	t.Helper()
	port := harness.FreePorts(t, 2*liveRanks)
	replay := port + liveRanks
	p = &livePublisher{t: t, connects: connects, args: []string{
		"testdata/live/publisher.py", kvEvents, "--ranks", strconv.Itoa(liveRanks),
		"--port", strconv.Itoa(port), "--replay-port", strconv.Itoa(replay),
	}}
	if connects {
		p.args = append(p.args, "--connect", "--topic", "kv@w@m")
		flags = []string{"--bind", fmt.Sprintf("tcp://127.0.0.1:%d,engine=sglang,replay_port=%d", port, replay)}
	} else {
		flags = []string{"--worker", fmt.Sprintf(
			"name=w,model=m,engine=sglang,dp_size=%d,connect=tcp://127.0.0.1:%d,replay=tcp://127.0.0.1:%d", liveRanks, port, replay)}
	}
	p.start()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("output of the publisher:\n%s", p.log)
		}
	})
	return p, flags
}

// start starts the next incarnation at the same ports.
func (p *livePublisher) start() {
	p.t.Helper()
	p.incarnations++
	p.cmd = exec.Command(filepath.Join(liveFolder, "venv/bin/python"), append(p.args, "--seed", strconv.Itoa(p.incarnations))...) //nolint:noctx // it is killed
	p.log = new(bytes.Buffer)
	p.cmd.Stderr = p.log
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		p.t.Fatal(err)
	}
	p.out = bufio.NewReader(out)
	stdin, write, err := os.Pipe()
	if err != nil {
		p.t.Fatal(err)
	}
	p.cmd.Stdin, p.stdin = stdin, write
	err = p.cmd.Start()
	_ = stdin.Close() // the process has its own copy
	if err != nil {
		p.t.Fatal(err)
	}
	if !p.answer().Ready {
		p.t.Fatal("the publisher is not ready")
	}
}

// kill kills the process with SIGKILL.
func (p *livePublisher) kill() {
	if p.cmd.ProcessState != nil {
		return
	}
	_ = p.cmd.Process.Kill() // fails if it has exited already
	_ = p.cmd.Wait()         // returns an error, since the process was killed
	_ = p.stdin.Close()
}

// answer waits for the process's next answer.
func (p *livePublisher) answer() (a liveAnswer) {
	p.t.Helper()
	stop := time.AfterFunc(livePatience, func() { _ = p.cmd.Process.Kill() })
	defer stop.Stop()
	line, err := p.out.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &a)
	}
	if err != nil {
		p.kill()
		p.t.Fatalf("the publisher does not answer: %v\n%s", err, p.log)
	}
	return a
}

func (p *livePublisher) command(format string, args ...any) {
	p.t.Helper()
	if _, err := fmt.Fprintf(p.stdin, format+"\n", args...); err != nil {
		p.t.Fatal(err)
	}
}

// publish publishes batches of each rank, and returns the blocks of each afterwards.
func (p *livePublisher) publish(batches int) []map[string][]int64 {
	p.t.Helper()
	p.command("publish %d", batches)
	return p.answer().Held
}

// burstAndDie publishes at least this many batches of each rank, and is killed while it
// publishes more.
func (p *livePublisher) burstAndDie(batches int) {
	p.t.Helper()
	p.command("burst")
	for p.answer().Burst < batches {
		continue
	}
	p.kill()
}

// liveRouter is a subscriber whose view is compared with an engine's blocks.
type liveRouter struct {
	t       *testing.T
	engine  *livePublisher
	checker *checker.Checker
	stream  kvcastv1.RouterEventService_SubscribeClient
	removed int // events
	// mayConflict reports whether two connections of the engine may have been open at a time.
	mayConflict bool
}

func newLiveRouter(t *testing.T, s *process, p *livePublisher) *liveRouter {
	t.Helper()
	r := &liveRouter{t: t, engine: p, checker: checker.New(checker.Options{})}
	req := &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_Snapshot{Snapshot: &kvcastv1.FromSnapshot{}}}
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	var err error
	if r.stream, err = s.Client().Subscribe(ctx, req); err != nil {
		t.Fatal(err)
	}
	if err := r.checker.Begin(req); err != nil {
		t.Fatal(err)
	}
	return r
}

// until receives messages until the given function returns nil.
func (r *liveRouter) until(what string, holds func() error) {
	r.t.Helper()
	// Progress messages, which arrive every 100 ms, end the wait if the view stays wrong.
	for deadline := time.Now().Add(livePatience); ; {
		wrong := holds()
		if wrong == nil {
			return
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("%s: %v", what, wrong)
		}
		m, err := r.stream.Recv()
		if err != nil {
			r.t.Fatalf("%s: %v; %v", what, err, wrong)
		}
		if err := r.checker.Receive(m); err != nil {
			r.t.Fatalf("%s: %v", what, err)
		}
		for _, e := range m.GetEntries() {
			if e.GetEvents()[0].GetWorkerRemoved() != nil {
				r.removed++
			}
		}
	}
}

// untilEqual receives messages until the view equals the engine's blocks. It fails if the server reports that they may
// differ. kvcast knows of an engine that connects from its next batch on: this publishes one every second.
func (r *liveRouter) untilEqual(what string, held []map[string][]int64) {
	r.t.Helper()
	if len(held) != liveRanks {
		r.t.Fatalf("%s: the publisher reports the blocks of %d ranks", what, len(held))
	}
	next := time.Now().Add(time.Second)
	r.until(what, func() error {
		wrong := r.holds(held)
		if wrong != nil && r.engine.connects && time.Now().After(next) {
			held, next = r.engine.publish(1), time.Now().Add(time.Second)
		}
		return wrong
	})
	for rank := range uint32(liveRanks) {
		gaps := slices.DeleteFunc(r.checker.View().Gaps("w", rank), func(g *kvcastv1.Gap) bool {
			return g.GetReason() == kvcastv1.Gap_REASON_REPLAY_UNPROVED || // until the next live batch
				r.mayConflict && g.GetReason() == kvcastv1.Gap_REASON_AMBIGUOUS_PUBLISHER
		})
		if len(gaps) > 0 {
			r.t.Errorf("%s: rank %d: gaps were reported, although all batches could be replayed: %v", what, rank, gaps)
		}
		if r.checker.View().Incomplete("w", rank) {
			r.t.Errorf("%s: rank %d is incomplete, although all batches could be replayed", what, rank)
		}
	}
}

func (r *liveRouter) holds(held []map[string][]int64) error {
	for rank, media := range held {
		for medium, blocks := range media {
			want := make(map[uint64]struct{}, len(blocks))
			for _, b := range blocks {
				want[uint64(b)] = struct{}{}
			}
			if d := r.checker.Difference("w", uint32(rank), liveTiers[medium], want); !d.Empty() {
				return fmt.Errorf("rank %d, %s: %v", rank, medium, d)
			}
		}
	}
	return nil
}

// wantCleared fails unless every rank was cleared or the worker was removed.
func (r *liveRouter) wantCleared(what string) {
	r.t.Helper()
	for rank := range uint32(liveRanks) {
		if err := r.checker.Reported("w", rank); err != nil && r.removed == 0 {
			r.t.Errorf("%s: %v", what, err)
		}
	}
}

// TestLivePublisher reads SGLang's publisher over both transports, and kills and restarts it.
func TestLivePublisher(t *testing.T) {
	testclass.Live(t)
	found, err := filepath.Glob(filepath.Join(liveFolder, "sglang-*", "kv_events.py"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(liveFolder, "pins")); err != nil || len(found) == 0 {
		t.Skip("SGLang's publisher is not here: make live fetches it")
	}
	for i, kvEvents := range found {
		t.Run(filepath.Base(filepath.Dir(kvEvents)), func(t *testing.T) {
			t.Parallel()
			harness.ForEachTransport(t, func(t *testing.T, zmq config.ZMQ) {
				t.Parallel()
				transports := []string{"--ingest-listen-transport", string(zmq), "--ingest-connect-transport", string(zmq)}
				for name, test := range map[string]func(*testing.T, string, bool, ...string){"restarts": testLivePublisher, "absence": testLiveAbsence} {
					t.Run("binds "+name, func(t *testing.T) {
						t.Parallel()
						test(t, kvEvents, false, transports...)
					})
					if i > 0 {
						continue // all versions connect in the same way
					}
					t.Run("connects "+name, func(t *testing.T) {
						t.Parallel()
						test(t, kvEvents, true, transports...)
					})
				}
			})
		})
	}
}

func testLivePublisher(t *testing.T, kvEvents string, connects bool, flags ...string) {
	p, sources := newLivePublisher(t, kvEvents, connects)
	// ZeroMQ queues at most a thousand replies.
	held := p.publish(2_500)
	// The router does not read while engines stop and start.
	flags = append(append(flags, sources...), "--ingest-silence", "1s", "--subscribers-progress", "100ms", "--subscribers-stall", "10m")
	s := serve(t, flags...)
	r := newLiveRouter(t, s, p)
	r.untilEqual("before kvcast came", held)
	r.untilEqual("live", p.publish(500))
	for rank := range uint32(liveRanks) {
		if r.checker.Reported("w", rank) == nil {
			t.Errorf("rank %d: an event reports a loss or a restart that did not occur", rank)
		}
	}

	// When kvcast knows that the connections have ended, it is stopped while the next incarnation has published nothing: whether an engine
	// without batches has restarted cannot be known, which would be reported.
	start := func(batches int) (held []map[string][]int64) {
		harness.WaitFor(t, func() bool { // one whose connection was silent before it ended is suspect
			return s.Sum("kvcast_ingest_publishers", "state", "connecting")+s.Sum("kvcast_ingest_publishers", "state", "suspect") == liveRanks
		})
		suspend(t, s, syscall.SIGSTOP)
		p.start()
		held = p.publish(batches)
		suspend(t, s, syscall.SIGCONT)
		return held
	}
	p.kill()
	r.untilEqual("after a restart", start(200))
	r.wantCleared("after a restart")
	r.untilEqual("live after a restart", p.publish(100))

	p.kill()
	r.untilEqual("after a restart that has passed the old seq", start(900))
	r.untilEqual("live after a restart that has passed the old seq", p.publish(100))

	p.burstAndDie(2_000)
	r.untilEqual("killed in a burst, and started again", start(3_000))

	// kvcast has not read all batches of the old incarnation when the next incarnation starts. If the engine connects to
	// kvcast, both connections are open then: they are a conflict until the old connection ends, if it is read later.
	r.mayConflict = p.connects
	for _, batches := range []int{300, 6_000} {
		suspend(t, s, syscall.SIGSTOP)
		p.burstAndDie(2_500)
		p.start()
		held = p.publish(batches)
		suspend(t, s, syscall.SIGCONT)
		r.untilEqual(fmt.Sprintf("killed in a burst that was unread, and started again with %d batches", batches), held)
	}
}

// testLiveAbsence kills a publisher, and starts it again when the server has removed the worker.
func testLiveAbsence(t *testing.T, kvEvents string, connects bool, flags ...string) {
	p, sources := newLivePublisher(t, kvEvents, connects)
	held := p.publish(100)
	s := serve(t, append(append(flags, sources...), "--ingest-silence", "1s", "--ingest-grace", liveGrace.String(), "--subscribers-progress", "100ms")...)
	r := newLiveRouter(t, s, p)
	r.untilEqual("before kvcast came", held)
	p.burstAndDie(1_000)
	r.until("away for longer than the grace time", func() error {
		if workers := r.checker.View().Workers(); len(workers) > 0 {
			return fmt.Errorf("the router has the workers %s", strings.Join(workers, ", "))
		}
		return nil
	})
	p.start()
	r.untilEqual("back after the grace time", p.publish(100))
	r.untilEqual("live in the end", p.publish(1))
}

// suspend stops or continues the server process.
func suspend(t *testing.T, s *process, signal syscall.Signal) {
	t.Helper()
	if err := s.Signal(signal); err != nil {
		t.Fatal(err)
	}
}
