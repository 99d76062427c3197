package routers_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/test/harness"
)

// Files that make routers prepares.
const (
	prepared = "../../bin/routers"
	llmd     = prepared + "/llmd"
	python   = prepared + "/python/venv/bin/python"
	vllm     = prepared + "/python/kv_events.py"
	kvHints  = prepared + "/python/kv_hints.py"
	kvcr     = prepared + "/python/hint_parser.py"
	dynamo   = prepared + "/dynamo"
	epp      = prepared + "/epp.test"
	smg      = prepared + "/smg/venv/bin/python"

	lmcache        = prepared + "/lmcache/venv/bin/python"
	lmcachePackage = prepared + "/lmcache/package/lmcache"

	mooncake             = prepared + "/mooncake/venv/bin/python"
	mooncakePackage      = prepared + "/mooncake/package/mooncake"
	mooncakeKeysOfVLLM   = prepared + "/python/mooncake_keys.py"
	mooncakeKeysOfSGLang = prepared + "/mooncake/sglang_keys.py"

	vllmRouter = prepared + "/vllm-router/venv/bin/vllm-router"
)

// need skips the test if a file is missing.
func need(t *testing.T, files ...string) {
	t.Helper()
	for _, file := range files {
		if _, err := os.Stat(file); err != nil {
			t.Skipf("%s is missing: run make routers to prepare it", file)
		}
	}
}

// engine is an engine with a model of its cache. A block is a path of digits from 1 to 3, as a number to the base 4.
type engine struct {
	t         *testing.T
	name      string
	number    uint64
	publisher *simulator.Publisher
	sockets   simulator.SocketConfig
	held      map[uint64]bool // by path
	// hashes makes the engine's hashes differ from those of engines with another number.
	hashes uint64
	random *rand.Rand
}

const (
	depth     = 4
	blockSize = 2
)

func newEngine(t *testing.T, number uint64) *engine {
	t.Helper()
	e := &engine{t: t, name: fmt.Sprintf("e%d", number), number: number, hashes: number, held: make(map[uint64]bool), random: rand.New(rand.NewPCG(number, 1))}
	e.sockets = simulator.SocketConfig{Endpoint: "tcp://127.0.0.1:*", Replay: "tcp://127.0.0.1:*"}
	e.start()
	e.sockets.Endpoint, e.sockets.Replay, e.sockets.Mode = e.publisher.Endpoint(), e.publisher.ReplayEndpoint(), simulator.ModeBind
	t.Cleanup(func() { _ = e.publisher.Close() })
	return e
}

func (e *engine) start() {
	e.t.Helper()
	var err error
	if e.publisher, err = simulator.NewPublisher(simulator.PublisherConfig{SocketConfig: e.sockets, BatchConfig: simulator.BatchConfig{EventForm: wire.FormMap}}); err != nil {
		e.t.Fatal(err)
	}
}

// restart restarts the engine with an empty cache.
func (e *engine) restart() {
	e.t.Helper()
	if err := e.publisher.Close(); err != nil {
		e.t.Fatal(err)
	}
	clear(e.held)
	e.start()
}

// hash returns the engine's hash of a path.
func (e *engine) hash(path uint64) uint64 { return e.hashes<<32 | path }

// tokens returns the tokens of the last block of a path.
func tokens(path uint64) []uint32 { return []uint32{uint32(path % 4), uint32(path%4) + 10} }

// promptOf returns the tokens of all blocks of a path.
func promptOf(path uint64) (prompt []uint32) {
	for n := 1; n <= depth; n++ {
		prompt = append(prompt, tokens(path>>(2*(depth-n)))...)
	}
	return prompt
}

// step publishes a random change of the cache. Some batches are lost by the network.
func (e *engine) step() {
	e.t.Helper()
	var events []wire.Event
	if path := e.randomPath(); e.random.IntN(3) > 0 {
		for n := 1; n <= depth; n++ {
			if prefix := path >> (2 * (depth - n)); !e.held[prefix] {
				e.held[prefix] = true
				events = append(events, wire.Event{
					Kind: wire.KindStored, BlockHashes: []uint64{e.hash(prefix)}, Tokens: tokens(prefix), BlockSize: blockSize,
					Medium: "GPU", HasParent: n > 1, Parent: e.hash(prefix >> 2),
				})
			}
		}
	} else {
		for n := depth; n > 0 && len(events) < 2; n-- { // leaves first
			if prefix := path >> (2 * (depth - n)); e.held[prefix] && !e.held[prefix*4+1] && !e.held[prefix*4+2] && !e.held[prefix*4+3] {
				delete(e.held, prefix)
				events = append(events, wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{e.hash(prefix)}, Medium: "GPU"})
			}
		}
	}
	if e.random.IntN(200) == 0 {
		clear(e.held)
		events = append(events, wire.Event{Kind: wire.KindCleared})
	}
	publish := e.publisher.Publish
	if e.random.IntN(10) == 0 {
		publish = e.publisher.Drop
	}
	if _, err := publish(events...); err != nil {
		e.t.Fatal(err)
	}
}

// touch publishes a block, and then that it is gone.
func (e *engine) touch() {
	e.t.Helper()
	hash := []uint64{e.hashes<<32 | 1<<31}
	for _, event := range []wire.Event{
		{Kind: wire.KindStored, BlockHashes: hash, Tokens: []uint32{100, 101}, BlockSize: blockSize, Medium: "GPU"},
		{Kind: wire.KindRemoved, BlockHashes: hash, Medium: "GPU"},
	} {
		if _, err := e.publisher.Publish(event); err != nil {
			e.t.Fatal(err)
		}
	}
}

// flush publishes a batch that is not lost, which makes earlier losses known.
func (e *engine) flush() {
	e.t.Helper()
	if _, err := e.publisher.Publish(); err != nil {
		e.t.Fatal(err)
	}
}

func (e *engine) randomPath() (path uint64) {
	for range depth {
		path = path*4 + 1 + e.random.Uint64N(3)
	}
	return path
}

// world is engines, and kvcast serve, which publishes their events.
type world struct {
	t       *testing.T
	engines []*engine
	args    []string
	process *harness.Process
	bind    string // endpoint of all workers
}

// newWorld starts two engines and kvcast, which publishes all workers at an endpoint. Zmq has further lines under egress.zmq, and flags are further flags.
func newWorld(t *testing.T, zmq string, flags ...string) *world {
	t.Helper()
	bind := fmt.Sprintf("tcp://127.0.0.1:%d", harness.FreePort(t))
	w := newWorldWith(t, "    bind: "+bind+"\n"+zmq, flags...)
	w.bind = bind
	return w
}

// newWorldWith has all lines under egress.zmq.
func newWorldWith(t *testing.T, zmq string, flags ...string) *world {
	t.Helper()
	w := &world{t: t, engines: []*engine{newEngine(t, 1), newEngine(t, 2)}}
	file := filepath.Join(t.TempDir(), "kvcast.yaml")
	text := "emit_token_ids: true\nretain_token_ids: true\negress:\n  zmq:\n" + zmq + "workers:\n"
	for _, e := range w.engines {
		text += fmt.Sprintf("  - {name: %s, model: m, endpoint: \"%s\", labels: {kvcast.io/fetch: \"25000\"}, sources: [{connect: \"%s\", replay: \"%s\"}]}\n",
			e.name, address(e), e.sockets.Endpoint, e.sockets.Replay)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	w.args = append([]string{"--config", file}, flags...)
	w.stopWithTest()
	w.serve()
	return w
}

// newPoolWorld starts kvcast, which reads a pool and engines of a model, of which the first two load from the pool. Flags are further flags.
func newPoolWorld(t *testing.T, engines []*engine, model, pool string, flags ...string) *world {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kvcast.yaml")
	name, _, _ := strings.Cut(strings.TrimPrefix(pool, "{name: "), ",")
	text := "ingest: {reconnect_max: 100ms}\nworkers:\n  - " + pool + "\n"
	for i, e := range engines {
		pools := ""
		if i < 2 {
			pools = "pools: [" + name + "], "
		}
		text += fmt.Sprintf("  - {name: %s, model: %s, %ssources: [{connect: \"%s\", replay: \"%s\"}]}\n", e.name, model, pools, e.sockets.Endpoint, e.sockets.Replay)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, engines: engines, args: append([]string{"--config", file, "--bind", "tcp://127.0.0.1:*"}, flags...)}
	w.stopWithTest()
	w.serve()
	return w
}

// stopWithTest stops kvcast when the test ends.
func (w *world) stopWithTest() {
	w.t.Cleanup(func() {
		if err := w.process.Stop(); err != nil {
			w.t.Error(err)
		} else if w.t.Failed() {
			w.t.Logf("the log of kvcast:\n%s", strings.Join(w.process.Log(), "\n"))
		}
	})
}

// address is where an engine is sent requests.
func address(e *engine) string { return fmt.Sprintf("10.0.0.%d:8000", e.number) }

func topic(e *engine) string { return "kv@" + address(e) + "@m" }

func (w *world) serve() {
	w.t.Helper()
	var err error
	if w.process, err = harness.StartProcess(harness.ProcessConfig{Race: testclass.RaceEnabled, Args: w.args}); err != nil {
		w.t.Fatal(err)
	}
	if _, err := w.process.Addr(); err != nil {
		w.t.Fatal(err)
	}
}

// restart restarts kvcast.
func (w *world) restart() {
	w.t.Helper()
	if err := w.process.Stop(); err != nil {
		w.t.Fatal(err)
	}
	w.serve()
}

// steps changes the caches of all engines.
func (w *world) steps(n int) {
	w.t.Helper()
	for range n {
		for _, e := range w.engines {
			e.step()
		}
	}
	for _, e := range w.engines {
		e.flush()
	}
}

// live changes the caches of all engines, has another consumer join late, restarts an engine and then kvcast, and checks all consumers after each.
func (w *world) live(join func(), check func(when string)) {
	w.t.Helper()
	w.steps(100)
	check("at the start")
	join()
	w.steps(50)
	check("after a late join")
	w.engines[0].restart()
	w.steps(30)
	check("after a restart of an engine")
	w.restart()
	w.steps(30)
	check("after a restart of kvcast")
}

// hashes returns the blocks that engines hold, by topic.
func (w *world) hashes() map[string][]uint64 {
	all := make(map[string][]uint64)
	for _, e := range w.engines {
		list := []uint64{}
		for path := range e.held {
			list = append(list, e.hash(path))
		}
		slices.Sort(list)
		all[topic(e)] = list
	}
	return all
}

// consumer is a program that answers a line for each line that it gets.
type consumer struct {
	t   *testing.T
	in  io.Writer
	out *bufio.Reader
	err *strings.Builder
}

// startConsumer starts a program, which ends with the test.
func startConsumer(t *testing.T, program string, args ...string) *consumer {
	t.Helper()
	c, _ := startEndingConsumer(t, program, args...)
	return c
}

// startEndingConsumer starts a program, which stop ends. It ends after the test at the latest.
func startEndingConsumer(t *testing.T, program string, args ...string) (_ *consumer, stop func()) {
	t.Helper()
	cmd := exec.CommandContext(harness.Context(t), program, args...)
	in, inErr := cmd.StdinPipe()
	out, outErr := cmd.StdoutPipe()
	c := &consumer{t: t, in: in, out: bufio.NewReaderSize(out, 1<<20), err: new(strings.Builder)}
	cmd.Stderr = c.err
	if err := errors.Join(inErr, outErr, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	stop = sync.OnceFunc(func() {
		_ = in.Close()
		_ = cmd.Wait()
		if c.err.Len() > 0 {
			t.Errorf("%s: %s", filepath.Base(program), c.err)
		}
	})
	t.Cleanup(stop)
	return c, stop
}

// ask sends a request, and decodes the answer.
func (c *consumer) ask(request, answer any) {
	c.t.Helper()
	text, err := json.Marshal(request)
	if err == nil {
		_, err = c.in.Write(append(text, '\n'))
	}
	var line []byte
	if err == nil {
		line, err = c.out.ReadBytes('\n')
	}
	if err == nil {
		err = json.Unmarshal(line, answer)
	}
	if err != nil {
		c.t.Fatalf("ask a consumer: %v: %s", err, c.err)
	}
}

// await asks until the answer is the one wanted.
func await[T any](t *testing.T, what string, want T, ask func() T) {
	t.Helper()
	var diff string
	defer func() {
		if t.Failed() {
			t.Logf("%s (-want +got):\n%s", what, diff)
		}
	}()
	harness.WaitFor(t, func() bool {
		diff = cmp.Diff(want, ask())
		return diff == ""
	})
}
