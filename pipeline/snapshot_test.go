package pipeline_test

import (
	"context"
	"errors"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/journal"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// heldBlock is a reader's record of a block.
type heldBlock struct {
	parent     uint64
	hasParent  bool
	tokensHash uint64
	hashed     bool
	blockSize  uint32
	lora       string
}

// heldPlace identifies a block in a rank and tier.
type heldPlace struct {
	rank uint32
	tier kvcastv1.Tier
	hash uint64
}

// reader applies a worker's events like a router that records every field.
type reader map[heldPlace]heldBlock

func (r reader) apply(ev *kvcastv1.RouterEvent) {
	at := heldPlace{rank: ev.GetDpRank(), tier: ev.GetTier()}
	switch {
	case ev.GetStored() != nil:
		s := ev.GetStored()
		b := heldBlock{parent: s.GetParentHash(), hasParent: s.ParentHash != nil, blockSize: s.GetBlockSize(), lora: s.GetLoraName()}
		for i, hash := range s.GetBlockHashes() {
			at.hash = hash
			if b.hashed = len(s.GetTokensHashes()) > 0; b.hashed {
				b.tokensHash = s.GetTokensHashes()[i]
			}
			if _, present := r[at]; !present || b.hashed {
				r[at] = b
			}
			b.parent, b.hasParent = hash, true
		}
	case ev.GetRemoved() != nil:
		for _, hash := range ev.GetRemoved().GetBlockHashes() {
			at.hash = hash
			delete(r, at)
		}
	case ev.GetCleared() != nil:
		maps.DeleteFunc(r, func(p heldPlace, _ heldBlock) bool { return p.rank == at.rank })
	}
}

// readSnapshot applies a worker's cut, and checks its form.
func readSnapshot(ctx context.Context, t interface{ Fatalf(string, ...any) }, p *pipeline.Pipeline, tiers journal.Tiers) (reader, pipeline.Snapshot) {
	cut, ok, err := p.Snapshot(ctx, testWorker, tiers)
	if err != nil || !ok {
		t.Fatalf("cut: %v, %v", ok, err)
	}
	r := make(reader)
	for piece, err := range cut.Blocks {
		if err != nil {
			panic(err)
		}
		var m kvcastv1.SnapshotBlocks
		if err := proto.Unmarshal(piece, &m); err != nil {
			t.Fatalf("decode blocks: %v", err)
		}
		if m.GetWorker() != testWorker || len(m.GetEvents()) == 0 {
			t.Fatalf("blocks of %q with %d events", m.GetWorker(), len(m.GetEvents()))
		}
		for _, ev := range m.GetEvents() {
			if ev.GetStored() == nil || ev.GetEventId() != 0 || ev.DpRank == nil {
				t.Fatalf("event %v within a snapshot", ev)
			}
			for _, hash := range ev.GetStored().GetBlockHashes() {
				if _, twice := r[heldPlace{ev.GetDpRank(), ev.GetTier(), hash}]; twice {
					t.Fatalf("block %d comes twice", hash)
				}
			}
			r.apply(ev)
		}
	}
	return r, cut
}

// readJournal applies the entries after a seq.
func readJournal(t interface{ Fatalf(string, ...any) }, j *journal.Memory, r reader, after uint64) {
	for {
		c, err := j.Read(context.Background(), journal.Query{After: after, MaxBytes: 1 << 20})
		if err != nil {
			t.Fatalf("read journal: %v", err)
		}
		if c.Last == after {
			return
		}
		for _, s := range c.Slices {
			var m kvcastv1.SubscribeResponse
			if err := proto.Unmarshal(s, &m); err != nil {
				t.Fatalf("decode entries: %v", err)
			}
			for _, e := range m.GetEntries() {
				for _, ev := range e.GetEvents() {
					r.apply(ev)
				}
			}
		}
		after = c.Last
	}
}

func testPipeline(t interface{ Fatalf(string, ...any) }) (*pipeline.Pipeline, *journal.Memory, feed.Lane) {
	j := journal.NewMemory(journal.Config{MaxBytes: 1 << 30})
	p, err := pipeline.New(pipeline.Config{}, j)
	if err != nil {
		t.Fatalf("new pipeline: %v", err)
	}
	return p, j, p.AddWorker(feed.Worker{Name: testWorker, Model: "m", Ranks: []uint32{0}})
}

// TestSnapshotIsTheStateAtItsSeq compares, after random batches, a cut with the entries up
// to its seq, and checks that parents come first.
func TestSnapshotIsTheStateAtItsSeq(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, j, lane := testPipeline(t)
		hash := rapid.Uint64Range(0, 12)
		for range rapid.IntRange(0, 30).Draw(t, "batches") {
			e := wire.Event{
				Kind:      rapid.SampledFrom([]wire.Kind{wire.KindStored, wire.KindStored, wire.KindStored, wire.KindRemoved, wire.KindCleared}).Draw(t, "kind"),
				Tier:      rapid.SampledFrom([]wire.Tier{wire.TierDevice, wire.TierDevice, wire.TierDisk}).Draw(t, "tier"),
				BlockSize: rapid.SampledFrom([]uint32{0, 16}).Draw(t, "block size"),
				LoRAName:  rapid.SampledFrom([]string{"", "a"}).Draw(t, "lora"),
			}
			e.BlockHashes = rapid.SliceOfNDistinct(hash, 1, 4, rapid.ID[uint64]).Draw(t, "hashes")
			if e.HasParent = rapid.Bool().Draw(t, "has parent"); e.HasParent {
				e.Parent = hash.Draw(t, "parent")
			}
			if e.Kind == wire.KindStored && rapid.Bool().Draw(t, "hashed") {
				for _, h := range e.BlockHashes {
					e.TokensHashes = append(e.TokensHashes, h+100)
				}
			}
			lane.Batch(&feed.Batch{Rank: rapid.Uint32Range(0, 1).Draw(t, "rank"), Events: []wire.Event{e}})
		}
		got, cut := readSnapshot(t.Context(), t, p, 0xff)
		if cut.Seq != j.Bounds().Newest {
			t.Fatalf("seq: got %d, want %d", cut.Seq, j.Bounds().Newest)
		}
		want := make(reader)
		readJournal(t, j, want, 0)
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(heldBlock{}, heldPlace{})); diff != "" {
			t.Fatalf("blocks (-entries +cut):\n%s", diff)
		}
		only, _ := readSnapshot(t.Context(), t, p, journal.TierBit(uint8(wire.TierDisk)))
		maps.DeleteFunc(want, func(p heldPlace, _ heldBlock) bool { return p.tier != kvcastv1.Tier_TIER_DISK })
		if diff := cmp.Diff(want, only, cmp.AllowUnexported(heldBlock{}, heldPlace{})); diff != "" {
			t.Fatalf("blocks of one tier (-entries +cut):\n%s", diff)
		}
	})
}

// TestSnapshotHasTheNewestBlockSize covers a learned block size, before and after a restart.
func TestSnapshotHasTheNewestBlockSize(t *testing.T) {
	p, _, lane := testPipeline(t)
	for _, step := range []struct {
		event wire.Event
		want  uint32
	}{
		{cleared(), 0},
		{withBlockSize(16, store(1)), 16},
		{withBlockSize(0, hashOnly(store(2))), 16},
		{withBlockSize(64, store(3)), 64},
	} {
		lane.Batch(&feed.Batch{Events: []wire.Event{step.event}})
		_, cut := readSnapshot(t.Context(), t, p, 0xff)
		if got := cut.Worker.GetAdded().GetBlockSize(); got != step.want {
			t.Errorf("block size after %+v: got %d, want %d", step.event, got, step.want)
		}
		lane.Restarted(feed.Restart{})
	}
}

// TestSnapshotOfATreeHasParentsFirst stores a tree in another order than the snapshot's.
func TestSnapshotOfATreeHasParentsFirst(t *testing.T) {
	p, _, lane := testPipeline(t)
	const n = 5000
	for h := uint64(n); h > 0; h-- { // children first
		lane.Batch(&feed.Batch{Events: []wire.Event{{
			Kind: wire.KindStored, Tier: wire.TierDevice, BlockHashes: []uint64{h}, HasParent: true, Parent: h / 3, BlockSize: 16,
		}}})
	}
	cut, _, err := p.Snapshot(t.Context(), testWorker, 0xff)
	if err != nil {
		t.Fatal(err)
	}
	seen, events := make(map[uint64]bool), 0
	for piece, err := range cut.Blocks {
		if err != nil {
			panic(err)
		}
		var m kvcastv1.SnapshotBlocks
		if err := proto.Unmarshal(piece, &m); err != nil {
			t.Fatal(err)
		}
		for _, ev := range m.GetEvents() {
			events++
			s := ev.GetStored()
			if parent := s.GetParentHash(); parent != 0 && !seen[parent] {
				t.Fatalf("block %d comes before its parent %d", s.GetBlockHashes()[0], parent)
			}
			for _, h := range s.GetBlockHashes() {
				seen[h] = true
			}
		}
	}
	if len(seen) != n {
		t.Errorf("got %d blocks, want %d", len(seen), n)
	}
	if events > n*3/4 {
		t.Errorf("%d blocks came in %d events, want chains in one", n, events)
	}
}

// TestSnapshotOfACycleEnds stores blocks that are each other's parents, as no correct engine
// does.
func TestSnapshotOfACycleEnds(t *testing.T) {
	p, _, lane := testPipeline(t)
	for h := range uint64(3) {
		lane.Batch(&feed.Batch{Events: []wire.Event{{
			Kind: wire.KindStored, Tier: wire.TierDevice, BlockHashes: []uint64{h + 1}, HasParent: true, Parent: (h+1)%3 + 1, BlockSize: 16,
		}}})
	}
	if got, _ := readSnapshot(t.Context(), t, p, 0xff); len(got) != 3 {
		t.Errorf("got %d blocks, want 3", len(got))
	}
}

func TestSnapshotOfAnUnknownWorker(t *testing.T) {
	p, _, _ := testPipeline(t)
	if _, ok, err := p.Snapshot(t.Context(), "nobody", 0xff); ok || err != nil {
		t.Errorf("got %v, %v, want no cut", ok, err)
	}
	p.RemoveWorker(testWorker, feed.RemovedDiscovery)
	if _, ok, err := p.Snapshot(t.Context(), testWorker, 0xff); ok || err != nil {
		t.Errorf("after removal: got %v, %v, want no cut", ok, err)
	}
}

// TestSnapshotUnderLoad reads cuts of a large table while its engine stores, clears and
// restarts: a cut followed by the entries after it always equals the state.
func TestSnapshotUnderLoad(t *testing.T) {
	p, j, lane := testPipeline(t)
	const pool = 60_000 // more than one step copies
	var next uint64
	step := func(i int) {
		stored := wire.Event{Kind: wire.KindStored, Tier: wire.TierDevice, BlockSize: 16, BlockHashes: make([]uint64, 64)}
		removed := wire.Event{Kind: wire.KindRemoved, Tier: wire.TierDevice, BlockHashes: make([]uint64, 64)}
		for k := range stored.BlockHashes {
			stored.BlockHashes[k], removed.BlockHashes[k] = next, next-pool
			next++
		}
		lane.Batch(&feed.Batch{Events: []wire.Event{stored, removed}})
		if i%2500 == 2499 {
			lane.Restarted(feed.Restart{})
		}
	}
	for i := range 2 * pool / 64 {
		step(i)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				step(i)
			}
		}
	})
	type taken struct {
		r   reader
		seq uint64
	}
	var all []taken
	for range 5 {
		r, cut := readSnapshot(t.Context(), t, p, 0xff)
		all = append(all, taken{r, cut.Seq})
	}
	close(stop)
	wg.Wait()
	want := make(reader)
	readJournal(t, j, want, 0)
	for _, c := range all {
		readJournal(t, j, c.r, c.seq)
		if !maps.Equal(want, c.r) {
			t.Errorf("the cut at %d and the entries after it come to %d blocks, all entries to %d", c.seq, len(c.r), len(want))
		}
	}
}

// TestSnapshotIsCanceled clears a table while it is copied, and cancels a reader.
func TestSnapshotIsCanceled(t *testing.T) {
	for name, interrupt := range map[string]func(feed.Lane, context.CancelFunc){
		"by a clear":       func(l feed.Lane, _ context.CancelFunc) { l.Restarted(feed.Restart{}) },
		"by its reader":    func(_ feed.Lane, cancel context.CancelFunc) { cancel() },
		"by the next step": func(feed.Lane, context.CancelFunc) {},
	} {
		t.Run(name, func(t *testing.T) {
			p, j, lane := testPipeline(t)
			const blocks = 200_000
			e := wire.Event{Kind: wire.KindStored, Tier: wire.TierDevice, BlockSize: 16, BlockHashes: make([]uint64, 1000)}
			for n := range uint64(blocks / 1000) {
				for i := range e.BlockHashes {
					e.BlockHashes[i] = n*1000 + uint64(i) + 1
				}
				e.HasParent, e.Parent = n > 0, n*1000
				lane.Batch(&feed.Batch{Events: []wire.Event{e}})
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			done := make(chan struct{})
			go func() {
				defer close(done)
				for range 3 { // at any time during the copy
					lane.Batch(&feed.Batch{Events: []wire.Event{{Kind: wire.KindRemoved, Tier: wire.TierDevice, BlockHashes: []uint64{1}}}})
				}
				interrupt(lane, cancel)
			}()
			r, cut := readSnapshot(ctx, t, p, 0xff)
			<-done
			if ctx.Err() != nil {
				return
			}
			want := make(reader)
			readJournal(t, j, want, 0)
			readJournal(t, j, r, cut.Seq)
			if !maps.Equal(want, r) {
				t.Errorf("the cut and the entries after it come to %d blocks, all entries to %d", len(r), len(want))
			}
		})
	}
}

// TestSnapshotAfterClose checks that a closed pipeline still serves snapshots.
func TestSnapshotAfterClose(t *testing.T) {
	p, _, lane := testPipeline(t)
	lane.Batch(&feed.Batch{Events: []wire.Event{{Kind: wire.KindStored, Tier: wire.TierDevice, BlockHashes: []uint64{1}}}})
	closePipeline(t, p)
	if got, _ := readSnapshot(t.Context(), t, p, 0xff); len(got) != 1 {
		t.Errorf("got %d blocks, want the one present", len(got))
	}
}

func TestLookupIsBounded(t *testing.T) {
	p, _, lane := testPipeline(t)
	lane.Batch(&feed.Batch{Events: []wire.Event{{
		Kind: wire.KindStored, Tier: wire.TierDevice, BlockHashes: []uint64{1, 2, 3}, TokensHashes: []uint64{7, 7, 7}, BlockSize: 16,
	}}})
	q := pipeline.Query{Match: func(string, string) bool { return true }, Tiers: 0xff, Limit: 2, BlockHashes: []uint64{1, 2, 1, 2, 1}}
	if got, err := p.Lookup(t.Context(), q); err != nil || len(got) != 2 {
		t.Errorf("hashes given many times: got %d, %v, want 2", len(got), err)
	}
	q.TokensHashes = []uint64{7}
	if _, err := p.Lookup(t.Context(), q); !errors.Is(err, pipeline.ErrTooManyHolders) {
		t.Errorf("more than the limit: got %v, want ErrTooManyHolders", err)
	}
}

func TestStatusAndLookup(t *testing.T) {
	p, _, lane := testPipeline(t)
	lane.Batch(&feed.Batch{Rank: 1, Events: []wire.Event{
		{Kind: wire.KindStored, Tier: wire.TierDevice, BlockSize: 16, BlockHashes: []uint64{1, 2}, TokensHashes: []uint64{11, 12}, LoRAName: "a"},
		{Kind: wire.KindStored, Tier: wire.TierDisk, BlockHashes: []uint64{2}},
	}})
	lane.Gap(feed.Gap{Rank: 1, Reason: feed.GapReplayUnavailable, FirstSeq: 3, LastSeq: 4, Missed: 2})
	everybody := func(string, string) bool { return true }
	want := []*kvcastv1.WorkerStatus{{
		Name: testWorker, Model: "m", BlockSize: 16, LastEventId: 4,
		Ranks: []*kvcastv1.RankStatus{{DpRank: 0}, {
			DpRank: 1, Incomplete: true, Gaps: 1, MissedBatches: 2,
			Blocks: []*kvcastv1.TierBlocks{{Tier: kvcastv1.Tier_TIER_DEVICE, Blocks: 2}, {Tier: kvcastv1.Tier_TIER_DISK, Blocks: 1}},
		}},
	}}
	if diff := cmp.Diff(want, p.Status(everybody), protoCompare); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
	if got := p.Status(func(string, string) bool { return false }); len(got) != 0 {
		t.Errorf("status of unknown worker: got %v", got)
	}
	a := "a"
	one := &kvcastv1.BlockHolder{
		BlockHash: 1, TokensHash: proto.Uint64(11), Worker: testWorker, Model: "m", DpRank: 1, Tier: kvcastv1.Tier_TIER_DEVICE, LoraName: &a,
	}
	two := &kvcastv1.BlockHolder{
		BlockHash: 2, TokensHash: proto.Uint64(12), Worker: testWorker, Model: "m", DpRank: 1, Tier: kvcastv1.Tier_TIER_DEVICE, LoraName: &a,
	}
	onDisk := &kvcastv1.BlockHolder{BlockHash: 2, Worker: testWorker, Model: "m", DpRank: 1, Tier: kvcastv1.Tier_TIER_DISK}
	for _, tt := range []struct {
		name  string
		query pipeline.Query
		want  []*kvcastv1.BlockHolder
	}{
		{"a block hash", pipeline.Query{BlockHashes: []uint64{1, 9}}, []*kvcastv1.BlockHolder{one}},
		{"a block in two tiers", pipeline.Query{BlockHashes: []uint64{2}}, []*kvcastv1.BlockHolder{two, onDisk}},
		{"a tokens hash", pipeline.Query{TokensHashes: []uint64{12, 99}}, []*kvcastv1.BlockHolder{two}},
		{"a block by both of its hashes", pipeline.Query{BlockHashes: []uint64{1}, TokensHashes: []uint64{11}}, []*kvcastv1.BlockHolder{one}},
		{"one tier", pipeline.Query{BlockHashes: []uint64{2}, Tiers: journal.TierBit(uint8(wire.TierDisk))}, []*kvcastv1.BlockHolder{onDisk}},
		{"nobody's", pipeline.Query{BlockHashes: []uint64{3}, TokensHashes: []uint64{1}}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.query.Match, tt.query.Limit = everybody, 10
			if tt.query.Tiers == 0 {
				tt.query.Tiers = 0xff
			}
			got, err := p.Lookup(t.Context(), tt.query)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got, protoCompare); diff != "" {
				t.Errorf("holders (-want +got):\n%s", diff)
			}
		})
	}
}

// protoCompare compares messages by proto.Equal.
var protoCompare = cmp.Comparer(proto.Equal)

// BenchmarkSnapshot reads all of a table of a million blocks.
func BenchmarkSnapshot(b *testing.B) {
	const blocks = 1_000_000
	l := newLane(b, 100)
	l.batch.Events = l.batch.Events[:1] // no block is evicted
	for range blocks / l.blocks {
		l.step()
	}
	for b.Loop() {
		cut, _, err := l.pipeline.Snapshot(b.Context(), "vllm-0", 0xff)
		if err != nil {
			b.Fatal(err)
		}
		for piece, err := range cut.Blocks {
			if err != nil {
				panic(err)
			}
			cut.Reuse(piece)
		}
	}
	b.ReportMetric(float64(b.N)*blocks/b.Elapsed().Seconds(), "blocks/s")
}

// BenchmarkSnapshotBlocksLane reports the slowest batch of one store within a second, once
// while the worker's 1,000,000 blocks are read and once while they are not. The second figure
// is the delay that the machine and the garbage collector cause by themselves.
func BenchmarkSnapshotBlocksLane(b *testing.B) {
	const blocks = 1_000_000
	l := newLane(b, 100)
	l.batch.Events = l.batch.Events[:1] // no block is evicted
	for range blocks / l.blocks {
		l.step()
	}
	stored := &l.batch.Events[0]
	l.blocks, stored.BlockHashes, stored.TokensHashes, stored.Tokens = 1, stored.BlockHashes[:1], stored.TokensHashes[:1], stored.Tokens[:16]
	longest := func() (worst time.Duration) {
		for end := time.Now().Add(time.Second); ; {
			l.next = blocks // the same blocks again, so that the table does not grow
			for range 1000 {
				began := time.Now()
				if began.After(end) {
					return worst
				}
				l.step()
				worst = max(worst, time.Since(began))
			}
		}
	}
	var with, without time.Duration
	for b.Loop() {
		without = max(without, longest())
		ctx, cancel := context.WithCancel(b.Context())
		var reading sync.WaitGroup
		reading.Go(func() {
			for ctx.Err() == nil {
				cut, _, err := l.pipeline.Snapshot(ctx, "vllm-0", 0xff)
				if err != nil {
					return
				}
				for piece, err := range cut.Blocks {
					if err != nil {
						panic(err)
					}
					cut.Reuse(piece)
				}
			}
		})
		with = max(with, longest())
		cancel()
		reading.Wait()
	}
	b.ReportMetric(float64(with.Microseconds())/1000, "max-ms")
	b.ReportMetric(float64(without.Microseconds())/1000, "max-ms-without")
}
