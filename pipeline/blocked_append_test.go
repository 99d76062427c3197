package pipeline_test

import (
	"context"
	"sync"
	"testing"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	"github.com/kvcast/kvcast/test/harness"
)

// blockingJournal is a journal whose appends return only after release, once block was called. The entries are visible before.
type blockingJournal struct {
	*journal.Memory
	blocked chan struct{} // has an element for each append that waits

	mu      sync.Mutex // guards release
	release chan struct{}
}

func (j *blockingJournal) Append(ctx context.Context, r journal.Record) (journal.Pending, error) {
	p, err := j.Memory.Append(ctx, r)
	j.mu.Lock()
	release := j.release
	j.mu.Unlock()
	if release != nil {
		j.blocked <- struct{}{}
		<-release
	}
	return p, err
}

func (j *blockingJournal) block() (release func()) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.release = make(chan struct{})
	return sync.OnceFunc(func() { close(j.release) })
}

// TestBlockedAppendHoldsUpNoReader reads everything that a server reads of the pipeline while a call of a lane waits for the
// journal: to append its own entry, and to append an entry of another lane, whose blocks it evicts.
func TestBlockedAppendHoldsUpNoReader(t *testing.T) {
	t.Parallel()
	for name, blocks := range map[string]int64{"own entry": 100, "entry of another lane": 8} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := &blockingJournal{Memory: journal.NewMemory(journal.Config{}), blocked: make(chan struct{}, 8)}
			p, err := pipeline.New(pipeline.Config{Durable: true, Blocks: budget.New("blocks", blocks)}, j)
			if err != nil {
				t.Fatal(err)
			}
			lanes := make(map[string]feed.Lane)
			for _, w := range []feed.Worker{
				{Name: "a"}, {Name: "b"},
				{Name: "c", Consolidate: feed.ConsolidateDedup, Sources: []feed.Engine{feed.EngineVLLM, feed.EngineKVBM}},
			} {
				lanes[w.Name] = p.AddWorker(w)
			}
			store := func(worker string, tier kvblock.Tier, hashes ...uint64) {
				lanes[worker].Batch(&feed.Batch{Events: []wire.Event{{Kind: wire.KindStored, Tier: tier, BlockHashes: hashes, BlockSize: 16}}})
			}
			store("b", kvblock.TierHostPinned, 1, 2, 3, 4)
			store("c", kvblock.TierDevice, 5)
			for _, worker := range []string{"a", "b", "c"} { // recovery then needs none of the entries so far
				p.CheckpointStored(mustCheckpoint(t, p, worker))
			}
			before := j.Bounds().Newest
			release := j.block()
			defer release()
			returned := make(chan struct{})
			go func() {
				defer close(returned)
				store("a", kvblock.TierDevice, 6, 7)
			}()
			<-j.blocked

			read := make(chan struct{})
			go func() {
				defer close(read)
				if n := harness.GatherFrom(t, p).Sum("kvcast_pipeline_events_total", "event", "worker_added"); n != 3 {
					t.Errorf("workers added: got %v, want 3", n)
				}
				p.CheckpointDue()
				if names := p.Aliases("c", 0, []uint64{5}); len(names) != 1 {
					t.Errorf("aliases: got %v, want those of the block", names)
				}
				if _, ok := p.Checkpoint("a", nil); ok {
					t.Error("there is a checkpoint of a worker whose lane is in use")
				}
				p.CheckpointStored(mustCheckpoint(t, p, "c"))
				p.CheckpointStored(mustCheckpoint(t, p, pipeline.RemovedWorkers))
				p.ObsoleteCheckpoints()
				if after := p.RetainAfter(j.Bounds().Newest); after > before {
					t.Errorf("the entries after %d are retained; want those after %d, which no checkpoint has", after, before)
				}
			}()
			select {
			case <-read:
			case <-harness.Context(t).Done():
				t.Error("a reader waits for an append")
			}
			release()
			<-returned
			<-read
			if after := p.RetainAfter(j.Bounds().Newest); after > before {
				t.Errorf("the entries after %d are retained; want those after %d, which no checkpoint has", after, before)
			}
			closePipeline(t, p)
		})
	}
}

func mustCheckpoint(t *testing.T, p *pipeline.Pipeline, worker string) pipeline.Checkpoint {
	t.Helper()
	c, ok := p.Checkpoint(worker, nil)
	if !ok {
		t.Errorf("there is no checkpoint %q", worker)
	}
	return c
}
