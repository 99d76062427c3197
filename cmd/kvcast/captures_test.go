package main_test

import (
	"encoding/binary"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/recording"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

const captures = "testdata/captures"

// message is a recorded message.
type message struct {
	topic   []byte
	seq     uint64
	payload []byte
	// restart reports whether the engine was restarted before it.
	restart bool
}

func readMessages(t *testing.T, file string) []message {
	t.Helper()
	var all []message
	for frames, err := range recording.ReadFile(file) {
		if err != nil {
			t.Fatal(err)
		}
		m := message{topic: frames[0], seq: binary.BigEndian.Uint64(frames[1]), payload: frames[2]}
		m.restart = len(all) > 0 && m.seq <= all[len(all)-1].seq
		all = append(all, m)
	}
	return all
}

// sentinel is the hash of a block that is in no recording. A batch that stores the block marks the end of a recording.
const sentinel = 0x5e47_1e1a_11e4_d00d

func sentinelAfter(last message) message {
	e := wire.Encoder{BatchForm: wire.FormArray, EventForm: wire.FormArray}
	payload := e.AppendBatch(nil, &wire.Batch{Time: 4e9, HasTime: true, Events: []wire.Event{{
		Kind: wire.KindStored, BlockHashes: []uint64{sentinel}, Medium: "GPU",
	}}})
	return message{topic: last.topic, seq: last.seq + 1, payload: payload}
}

// newEngine returns an engine without a high-water mark, which drops no message.
func newEngine(t *testing.T) *enginetest.Engine {
	t.Helper()
	e := enginetest.New(enginetest.Config{HighWaterMark: -1})
	t.Cleanup(e.Close)
	return e
}

// play waits for a subscriber, and then publishes messages.
func play(t *testing.T, e *enginetest.Engine, messages []message) {
	t.Helper()
	if _, err := e.AwaitSubscription(); err != nil {
		t.Fatal(err)
	}
	for _, m := range messages {
		e.Publish(m.topic, m.seq, m.payload)
	}
}

// live lists the recordings of live traffic with their engines. If an engine announces reused blocks, the view may lack
// some blocks; their maximum number is given.
var live = []struct {
	name    string
	engine  string
	missing int
}{
	{"vllm-array", "vllm", 0},
	{"vllm-map", "vllm", 0},
	{"sglang-array", "sglang", 0},
	{"llm-d-sim-array", "llm-d-sim", 0},
	{"llm-d-sim-map", "llm-d-sim", 0},
	{"vllm-blockpool/a_small_pool/frames", "vllm", 0},
	{"vllm-blockpool/c_reset_restart/frames", "vllm", 0},
	{"engines-2026-11/i_incremental/frames", "vllm", 0},
	{"engines-2026-11/ii_full/frames", "vllm", 10},
	{"engines-2026-11/iii_mixed/frames", "vllm", 10},
	{"engines-2026-11/iv_hybrid_mixed/frames", "vllm", 10},
	{"engines-2026-11/v_reset_restart_full/frames", "vllm", 10},
	{"engines-2026-11/vii_mixed_skip_reading/frames", "vllm", 10},
	{"engines-2026-11/x_short_prompts_full/frames", "vllm", 10},
	{"engines-2026-11/xiv_mamba_partial_short_first/frames", "vllm", 0},
	{"engines-2026-11/sglang_radix_p16/frames", "sglang", 0},
	{"engines-2026-11/sglang_unified_names/frames", "sglang", 0},
	{"engines-2026-11/sglang_unified_hicache/frames", "sglang", 0},
	{"vllm-real/plain_v0/frames", "vllm", 0},
	{"vllm-real/plain_v1/frames", "vllm", 0},
	{"vllm-real/salts/frames", "vllm", 0},
	{"vllm-real/restart_reset_salts_preempt/frames", "vllm", 10},
	{"vllm-real/offload_cpu_reset/frames", "vllm", 0},
}

// hybrid lists the recordings of engines with several attention groups.
var hybrid = []string{
	"vllm-array", "vllm-map",
	"engines-2026-11/iv_hybrid_mixed/frames", "engines-2026-11/xiv_mamba_partial_short_first/frames",
}

// TestRecordingsMatchTheEnginesBlocks plays each recording into the real binary, and
// compares a subscriber's blocks after every batch. GroupsOmitted is sent for hybrid models only,
// and the checker reports it if it is sent twice.
func TestRecordingsMatchTheEnginesBlocks(t *testing.T) {
	testclass.Process(t)
	testclass.WithoutRace(t)
	for _, c := range live {
		t.Run(c.name, func(t *testing.T) {
			messages := readMessages(t, filepath.Join(captures, c.name+".jsonl.gz"))
			account := account{missing: c.missing, hybrid: slices.Contains(hybrid, c.name)}
			switch {
			case c.name == "vllm-real/offload_cpu_reset/frames":
				account.reports = kvcastv1.Gap_REASON_TIER_NOT_CLEARED // the pool in device memory was cleared
			case c.missing > 0:
				account.reports = kvcastv1.Gap_REASON_COPIES_UNSURE
			}
			if dir, ok := strings.CutSuffix(c.name, "/frames"); ok {
				var err error
				if account.checkpoints, account.blockSize, err = readCheckpoints(filepath.Join(captures, dir)); err != nil {
					t.Fatal(err)
				}
			}
			t.Run("connect", func(t *testing.T) {
				t.Parallel()
				e := newEngine(t)
				endpoint, err := e.Bind("tcp://127.0.0.1:*")
				if err != nil {
					t.Fatal(err)
				}
				s := serve(t, "--worker", fmt.Sprintf("name=w,model=m,engine=%s,connect=%s", c.engine, endpoint))
				play(t, e, append(messages[:len(messages):len(messages)], sentinelAfter(messages[len(messages)-1])))
				followRecording(t, s, "w", messages, account)
			})
			t.Run("bind", func(t *testing.T) {
				t.Parallel()
				s := serve(t, "--bind", "tcp://127.0.0.1:*,engine="+c.engine)
				e := newEngine(t)
				if err := e.Connect(s.Endpoint()); err != nil {
					t.Fatal(err)
				}
				renamed := make([]message, len(messages))
				for i, m := range messages {
					m.topic = []byte("kv@10.0.0.7:8000@Qwen/Qwen3-0.6B")
					renamed[i] = m
				}
				play(t, e, append(renamed, sentinelAfter(renamed[len(renamed)-1])))
				followRecording(t, s, "10.0.0.7:8000", renamed, account)
			})
		})
	}
}

// account is the information about an engine's blocks besides its events.
type account struct {
	checkpoints []checkpoint // after each batch; nil if the recording has no checkpoints
	blockSize   int
	// missing is the maximum number of blocks that the view may lack.
	missing int
	// hybrid reports whether the engine has other attention groups.
	hybrid bool
	// reports is the reason of all Gaps of the recording; 0 if it has none.
	reports kvcastv1.Gap_Reason
}

// follower compares a worker's view with the engine's blocks, batch by batch.
type follower struct {
	account
	t         *testing.T
	worker    string
	messages  []message
	times     []int64 // engine time of each
	restartAt int     // the first batch of the engine's second incarnation
	view      *checker.View
	oracle    *oracle
	next      int // the batch to compare next
}

// compare compares the current view with the state after the next batch.
func (f *follower) compare() {
	f.t.Helper()
	if f.next == f.restartAt {
		f.oracle.restart()
	}
	labels := ""
	if f.checkpoints != nil {
		labels = f.checkpoints[f.next].Labels
	}
	if _, err := f.oracle.apply(f.messages[f.next].payload, labels); err != nil {
		f.t.Fatal(err)
	}
	got, want := f.view.Blocks(f.worker, 0, kvcastv1.Tier_TIER_DEVICE), f.oracle.blocks()
	if f.checkpoints != nil {
		if pool := f.checkpoints[f.next]; len(want) != pool.Len || digest(want) != pool.SHA256 {
			f.t.Fatalf("after batch %d: the oracle has %d blocks with digest %s, the pool had %d with %s",
				f.next, len(want), digest(want), pool.Len, pool.SHA256)
		}
	}
	missing, extra := maps.Clone(want), maps.Clone(got)
	maps.DeleteFunc(missing, func(h uint64, _ struct{}) bool { _, ok := got[h]; return ok })
	maps.DeleteFunc(extra, func(h uint64, _ struct{}) bool { _, ok := want[h]; return ok })
	if len(missing) > f.missing || len(extra) > 0 {
		f.t.Fatalf("after batch %d of %d (-oracle +view):\n%s", f.next, len(f.messages), cmp.Diff(want, got))
	}
	f.next++
}

// entry applies an entry, and compares the view before and after it. Batches without effect have no entry, and do not
// change the view.
func (f *follower) entry(e *kvcastv1.Entry) {
	f.t.Helper()
	at := e.GetEngineTimeUnixNano()
	switch {
	case stores(e, sentinel):
		for f.next < len(f.messages) {
			f.compare()
		}
		return
	case restarts(e):
		for f.next < f.restartAt {
			f.compare()
		}
	case at != 0:
		for f.next < len(f.messages) && f.times[f.next] != at {
			f.compare()
		}
	}
	f.view.Apply(e)
	if at != 0 {
		f.compare()
	}
}

// followRecording subscribes, and after each batch compares the worker's blocks
// with the oracle's blocks, and with the pool's checkpoints, if any.
func followRecording(t *testing.T, s *process, worker string, messages []message, account account) {
	t.Helper()
	if n := len(account.checkpoints); n != 0 && n != len(messages) {
		t.Fatalf("%d checkpoints for %d batches", n, len(messages))
	}
	f := &follower{
		account: account, t: t, worker: worker, messages: messages, restartAt: len(messages),
		view: checker.NewView(), oracle: newOracle(account.blockSize),
	}
	for i, m := range messages {
		ts, err := newOracle(0).apply(m.payload, "")
		if err != nil {
			t.Fatal(err)
		}
		f.times = append(f.times, engineTime(ts))
		if m.restart {
			f.restartAt = i
		}
	}
	c := checker.New(checker.Options{})
	req := &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}}}
	stream, err := s.Client().Subscribe(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Begin(req); err != nil {
		t.Fatal(err)
	}
	for f.next < len(messages) {
		m, err := stream.Recv()
		if err != nil {
			t.Fatalf("receive after batch %d: %v", f.next, err)
		}
		if err := c.Receive(m); err != nil {
			t.Fatal(err)
		}
		for _, e := range m.GetEntries() {
			f.entry(e)
		}
	}
	if got := c.View().GroupsOmitted(worker, 0); got != account.hybrid {
		t.Errorf("GroupsOmitted: got %v, want %v", got, account.hybrid)
	}
	gaps := c.View().Gaps(worker, 0)
	if n := len(gaps); n > 0 && gaps[n-1].GetReason() == kvcastv1.Gap_REASON_UNKNOWN_CONTENT {
		gaps = gaps[:n-1] // the sentinel is a store of a hash alone
	}
	for _, g := range gaps {
		if g.GetReason() != account.reports {
			t.Errorf("a gap was reported though nothing was lost: %v", g)
		}
	}
	if account.reports != 0 && len(gaps) == 0 {
		t.Errorf("no gap was reported, want one for %v", account.reports)
	}
}

func stores(e *kvcastv1.Entry, hash uint64) bool {
	for _, ev := range e.GetEvents() {
		for _, h := range ev.GetStored().GetBlockHashes() {
			if h == hash {
				return true
			}
		}
	}
	return false
}

func restarts(e *kvcastv1.Entry) bool {
	return e.GetEvents()[0].GetCleared().GetReason() == kvcastv1.Cleared_REASON_ENGINE_RESTARTED
}
