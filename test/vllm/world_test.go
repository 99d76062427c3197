package vllm_test

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// model is the name of the model in kvcast; the engine's topic has it.
const model = "m"

// ports are those of an engine's publisher and its replay socket.
type ports struct{ publish, replay int }

func freePorts(t *testing.T) ports {
	t.Helper()
	return ports{harness.FreePort(t), harness.FreePort(t)}
}

// events returns the arguments of KVEventsConfig. vLLM binds to an address with a star only.
func (p ports) events() map[string]any {
	return map[string]any{"endpoint": fmt.Sprintf("tcp://*:%d", p.publish), "replay_endpoint": fmt.Sprintf("tcp://*:%d", p.replay)}
}

// worker returns flags that read an engine there.
func (p ports) worker() []string {
	return []string{"--worker", fmt.Sprintf("name=e,model=%s,connect=tcp://127.0.0.1:%d,replay=tcp://127.0.0.1:%d", model, p.publish, p.replay)}
}

// subject is a rank of an engine that answers prompts, and knows what it has cached.
type subject interface {
	// generate runs prompts at the same time.
	generate(prompts ...prompt) []output
	// seq returns the number of the last batch published, -1 for none.
	seq() int64
	// hashes returns the cached blocks of the main attention group after that batch, ascending.
	hashes() []uint64
	// tells reports whether the events of stored blocks have a field.
	tells(field string) bool
}

// whole returns the trust of a rank that lacks nothing.
func whole(e subject) kvcastv1.Trust {
	if !e.tells("extra_keys") { // nor the cache salts of requests
		return degraded
	}
	return exact
}

// relay is kvcast serve, which reads one worker.
type relay struct {
	t       *testing.T
	args    []string
	process *harness.Process
	conn    *grpc.ClientConn
	client  kvcastv1.RouterEventServiceClient
	rank    uint32 // that answers are about
}

// ofRank returns the same process, with answers about another rank.
func (k *relay) ofRank(rank uint32) *relay {
	other := *k
	other.rank = rank
	return &other
}

// startRelay starts kvcast, which stops with the test.
func startRelay(t *testing.T, args ...string) *relay {
	t.Helper()
	k := &relay{t: t, args: args}
	k.start()
	t.Cleanup(func() {
		k.stop()
		if t.Failed() {
			t.Logf("the log of kvcast:\n%s", strings.Join(k.process.Log(), "\n"))
		}
	})
	return k
}

func (k *relay) start() {
	k.t.Helper()
	var err error
	if k.process, err = harness.StartProcess(harness.ProcessConfig{Race: testclass.RaceEnabled, Args: k.args}); err != nil {
		k.t.Fatal(err)
	}
	addr, err := k.process.Addr()
	if err != nil {
		k.t.Fatal(err)
	}
	k.conn = harness.Dial(k.t, addr)
	k.client = kvcastv1.NewRouterEventServiceClient(k.conn)
}

func (k *relay) stop() {
	if err := k.process.Stop(); err != nil {
		k.t.Error(err)
	}
}

// crash ends kvcast with SIGKILL.
func (k *relay) crash() {
	k.t.Helper()
	if err := k.process.Kill(); err != nil {
		k.t.Fatal(err)
	}
}

// status returns the worker; nil if there is none.
func (k *relay) status() *kvcastv1.WorkerStatus {
	k.t.Helper()
	list, err := k.client.ListWorkers(harness.Context(k.t), &kvcastv1.ListWorkersRequest{})
	if err != nil {
		k.t.Fatal(err)
	}
	if len(list.GetWorkers()) != 1 {
		return nil
	}
	return list.GetWorkers()[0]
}

// await waits until kvcast has applied the engine's last batch, and returns the position.
func (k *relay) await(e subject) *kvcastv1.Position {
	k.t.Helper()
	seq := e.seq()
	k.awaitState(fmt.Sprintf("batch %d of rank %d", seq, k.rank), func(w *kvcastv1.WorkerStatus) bool {
		s := k.source(w)
		return s.GetState() == kvcastv1.SourceState_SOURCE_STATE_LIVE && (seq < 0 || s.GetStarted() && s.GetLastSeq() == uint64(seq))
	})
	status, err := k.client.GetStatus(harness.Context(k.t), &kvcastv1.GetStatusRequest{})
	if err != nil {
		k.t.Fatal(err)
	}
	return &kvcastv1.Position{Epoch: status.GetEpoch(), Seq: status.GetNewestSeq()}
}

// source returns the source of the rank; nil if there is none.
func (k *relay) source(w *kvcastv1.WorkerStatus) *kvcastv1.SourceStatus {
	for _, s := range w.GetSources() {
		if s.GetDpRank() == k.rank {
			return s
		}
	}
	return nil
}

// awaitState waits until a condition is true of the worker.
func (k *relay) awaitState(what string, condition func(*kvcastv1.WorkerStatus) bool) {
	k.t.Helper()
	var last *kvcastv1.WorkerStatus
	met := false
	defer func() {
		if !met {
			k.t.Logf("waited for %s; the worker is %v", what, last)
		}
	}()
	harness.WaitFor(k.t, func() bool {
		last = k.status()
		met = last != nil && condition(last)
		return met
	})
}

// awaitLive returns a channel with the time at which kvcast reads the engine.
func (k *relay) awaitLive() <-chan time.Time {
	live := make(chan time.Time, 1)
	go func() {
		poll := time.NewTicker(10 * time.Millisecond)
		defer poll.Stop()
		for k.t.Context().Err() == nil {
			list, err := k.client.ListWorkers(k.t.Context(), &kvcastv1.ListWorkersRequest{})
			if err == nil && len(list.GetWorkers()) == 1 && k.source(list.GetWorkers()[0]).GetState() == kvcastv1.SourceState_SOURCE_STATE_LIVE {
				live <- time.Now()
				return
			}
			select {
			case <-poll.C:
			case <-k.t.Context().Done():
			}
		}
	}()
	return live
}

// prediction is what kvcast says that an engine has of a prompt in device memory.
type prediction struct {
	tokens  int
	trust   kvcastv1.Trust
	reasons []kvcastv1.DegradedReason
}

func (p prediction) String() string {
	text := strings.TrimPrefix(p.trust.String(), "TRUST_")
	for _, r := range p.reasons {
		text += " " + strings.TrimPrefix(r.String(), "DEGRADED_REASON_")
	}
	return text
}

// match asks for a prompt at a position, and returns what the engine can reuse of it from device memory, and from all tiers. The engine always computes the
// last token of a prompt, so that it cannot reuse a block of its pool that ends with it.
func (k *relay) match(at *kvcastv1.Position, p prompt) (device, all prediction) {
	k.t.Helper()
	answer, err := k.client.MatchPrefix(harness.Context(k.t), &kvcastv1.MatchPrefixRequest{
		Model: model, After: at, MaxWaitNano: uint64(10 * time.Second),
		Prompts: []*kvcastv1.Prompt{{TokenIds: p.Tokens, LoraName: p.LoRA, CacheSalt: p.Salt, ExcludeLastToken: true}},
	})
	if err != nil {
		k.t.Fatal(err)
	}
	return k.prediction(answer.GetPrompts()[0].GetMatches())
}

// prediction returns what the matches of a prompt say about the rank: in device memory, and in all tiers.
func (k *relay) prediction(matches []*kvcastv1.PrefixMatch) (device, all prediction) {
	k.t.Helper()
	i := slices.IndexFunc(matches, func(m *kvcastv1.PrefixMatch) bool { return m.GetDpRank() == k.rank })
	if i < 0 {
		return k.rankTrust()
	}
	m := matches[i]
	all = prediction{int(m.GetTokens()), m.GetTrust(), m.GetReasons()}
	for _, tier := range m.GetTiers() {
		if tier.GetTier() != kvcastv1.Tier_TIER_DEVICE {
			continue
		}
		if tier.GetTrust() == kvcastv1.Trust_TRUST_UNSPECIFIED {
			return prediction{int(tier.GetTokens()), all.trust, all.reasons}, all
		}
		return prediction{int(tier.GetTokens()), tier.GetTrust(), tier.GetReasons()}, all
	}
	return k.trust(), all // the match is in other tiers alone
}

// rankTrust returns the trust of the rank without a match: of device memory, and of all tiers.
func (k *relay) rankTrust() (device, all prediction) {
	k.t.Helper()
	ranks := k.status().GetRanks()
	i := slices.IndexFunc(ranks, func(r *kvcastv1.RankStatus) bool { return r.GetDpRank() == k.rank })
	if i < 0 {
		all = prediction{trust: kvcastv1.Trust_TRUST_EXACT} // nothing is known to be in any cache
		return all, all
	}
	r := ranks[i]
	all = prediction{trust: r.GetTrust(), reasons: r.GetReasons()}
	device = all
	if len(r.GetTierReasons()) > 0 {
		device = prediction{trust: kvcastv1.Trust_TRUST_EXACT}
	}
	for _, tier := range r.GetTierReasons() {
		if tier.GetTier() == kvcastv1.Tier_TIER_DEVICE {
			device = prediction{trust: kvcastv1.Trust_TRUST_DEGRADED, reasons: tier.GetReasons()}
		}
	}
	return device, all
}

// trust returns the trust of device memory.
func (k *relay) trust() prediction {
	k.t.Helper()
	device, _ := k.rankTrust()
	return device
}

// hashes returns the block hashes that kvcast has in a tier.
func (k *relay) hashes(tier kvcastv1.Tier) []uint64 {
	k.t.Helper()
	return k.hashesOf("", tier)
}

// hashesOf returns those of a worker; empty for the only one.
func (k *relay) hashesOf(worker string, tier kvcastv1.Tier) []uint64 {
	k.t.Helper()
	filter := new(kvcastv1.Filter)
	if worker != "" {
		filter.Workers = []string{worker}
	}
	stream, err := k.client.Snapshot(harness.Context(k.t), &kvcastv1.SnapshotRequest{Filter: filter})
	if err != nil {
		k.t.Fatal(err)
	}
	set := make(map[uint64]bool)
	apply := func(events []*kvcastv1.RouterEvent) {
		for _, event := range events {
			if event.GetDpRank() != k.rank {
				continue
			}
			switch cleared := event.GetCleared(); {
			case cleared != nil && (len(cleared.GetTiers()) == 0 || slices.Contains(cleared.GetTiers(), tier)):
				clear(set)
			case event.GetTier() == tier:
				for _, hash := range event.GetStored().GetBlockHashes() {
					set[hash] = true
				}
				for _, hash := range event.GetRemoved().GetBlockHashes() {
					delete(set, hash)
				}
			}
		}
	}
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return slices.Sorted(maps.Keys(set))
		}
		if err != nil {
			k.t.Fatal(err)
		}
		for _, blocks := range message.GetSnapshotBlocks() {
			apply(blocks.GetEvents())
		}
		for _, entry := range message.GetEntries() { // those since the blocks were read
			apply(entry.GetEvents())
		}
	}
}
