package vllm_test

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"testing"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/adapter/vllm"
	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// held is the blocks of a consumer: the tiers of each block hash, and what it knows of the content.
type held map[uint64]uint8

// router is a consumer as routers are: it computes contents from tokens and the parent, and refuses what it cannot place. It
// counts stores, as one of them does, so that a store that comes twice is never removed.
type router struct {
	t       *rapid.T
	copies  map[uint64]map[string]int // by block hash and medium
	content map[uint64]string         // all tokens from the start, by block hash
	last    uint64
	started bool
	// late is set if the router began with a state, which may lack blocks that are removed by later batches.
	late bool
}

func newRouter(t *rapid.T) *router {
	return &router{t: t, copies: make(map[uint64]map[string]int), content: make(map[uint64]string)}
}

func (r *router) held() held {
	all := make(held)
	for hash, media := range r.copies {
		for medium := range media {
			all[hash] |= map[string]uint8{"GPU": 2, "CPU": 4, "STORAGE": 8, "EXTERNAL": 16}[medium]
		}
	}
	return all
}

// apply applies a batch, whose seq must be the next one unless the router begins with it.
func (r *router) apply(b vllm.Batch) {
	if r.started && b.Seq != r.last+1 {
		r.t.Fatalf("got batch %d after %d", b.Seq, r.last)
	}
	r.last, r.started = b.Seq, true
	var d wire.Decoder
	batch, err := d.Decode(b.Payload)
	if err != nil || len(batch.Skipped) > 0 {
		r.t.Fatalf("batch %d: %v, %d events skipped", b.Seq, err, len(batch.Skipped))
	}
	for i := range batch.Events {
		r.event(&batch.Events[i])
	}
}

func (r *router) event(e *wire.Event) {
	switch e.Kind {
	case wire.KindCleared:
		clear(r.copies)
		clear(r.content)
	case wire.KindRemoved:
		for _, hash := range e.BlockHashes {
			if r.copies[hash][e.Medium] == 0 {
				continue // removed since a state was copied
			}
			if r.copies[hash][e.Medium]--; r.copies[hash][e.Medium] == 0 {
				delete(r.copies[hash], e.Medium)
			}
			if len(r.copies[hash]) == 0 {
				delete(r.copies, hash)
				delete(r.content, hash)
			}
		}
	case wire.KindStored:
		r.stored(e)
	}
}

func (r *router) stored(e *wire.Event) {
	content, size := "", int(e.BlockSize)
	if e.HasParent {
		known, ok := r.content[e.Parent]
		if !ok && r.late {
			return
		}
		if !ok {
			r.t.Fatalf("blocks %v follow the unknown block %d", e.BlockHashes, e.Parent)
		}
		content = known
	}
	for i, hash := range e.BlockHashes {
		if size > 0 {
			content += fmt.Sprint(e.LoRAName, e.Tokens[i*size:(i+1)*size])
			r.content[hash] = content
		} else if _, ok := r.content[hash]; !ok && r.late {
			continue
		} else if !ok {
			r.t.Fatalf("block %d without tokens is unknown", hash)
		}
		if r.copies[hash] == nil {
			r.copies[hash] = make(map[string]int)
		}
		r.copies[hash][e.Medium]++
	}
}

// engine is a dp rank whose entries go to an index and to a stream, which may be behind the index.
type engine struct {
	t       *rapid.T
	index   *index.Index
	stream  *vllm.Stream
	pending []*kvcastv1.RouterEvent // that the stream has not applied
	seq     uint64
}

func newEngine(t *rapid.T, first uint64) *engine {
	e := &engine{t: t, index: index.New(), stream: vllm.NewStream("w", 0, "kv@w@m", wire.FormMap, first)}
	e.index.RetainTokenIDs(1 << 30)
	e.apply(&kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: &kvcastv1.WorkerAdded{Model: "m", BlockSize: 2, Ranks: []uint32{0}}}})
	return e
}

func (e *engine) apply(event *kvcastv1.RouterEvent) {
	e.seq++
	e.index.ApplyEntry(&kvcastv1.Entry{Seq: e.seq, Worker: "w", Model: "m", Events: []*kvcastv1.RouterEvent{event}})
	e.pending = append(e.pending, event)
}

// path returns a random prompt as digits from 1 to 3, and its block hashes.
func (e *engine) path() (digits []uint32, hashes []uint64) {
	path := uint64(0)
	for range rapid.IntRange(1, 5).Draw(e.t, "depth") {
		digit := rapid.Uint32Range(1, 3).Draw(e.t, "content")
		path = path*4 + uint64(digit)
		digits, hashes = append(digits, digit), append(hashes, path)
	}
	return digits, hashes
}

// change changes the blocks of the engine. In each tier, children are removed before their parents, as engines do, unless strict
// is unset.
func (e *engine) change(strict bool) {
	tier := kvcastv1.Tier(rapid.SampledFrom([]int32{1, 1, 1, 2, 4}).Draw(e.t, "tier"))
	digits, hashes := e.path()
	event := &kvcastv1.RouterEvent{DpRank: proto.Uint32(0), Tier: tier}
	switch rapid.IntRange(0, 13).Draw(e.t, "change") {
	case 0:
		event.Event = &kvcastv1.RouterEvent_Cleared{Cleared: &kvcastv1.Cleared{}}
		event.Tier = 0
	case 1:
		event.Event = &kvcastv1.RouterEvent_Cleared{Cleared: &kvcastv1.Cleared{Tiers: []kvcastv1.Tier{2, 4}}} // not the device
		event.Tier = 0
	case 2, 3, 4, 5:
		e.remove(tier, hashes[len(hashes)-1], strict)
		return
	case 6, 7: // offload blocks by their hashes alone, and the last one from the device
		for _, hash := range hashes {
			if len(e.index.Tiers("w", 0, hash)) == 0 {
				return
			}
		}
		event.Event, event.Tier = &kvcastv1.RouterEvent_Stored{Stored: &kvcastv1.Stored{BlockHashes: hashes}}, 2
		e.apply(event)
		e.remove(1, hashes[len(hashes)-1], strict)
		return
	default:
		s := &kvcastv1.Stored{BlockHashes: hashes, BlockSize: 2}
		if rapid.IntRange(0, 4).Draw(e.t, "adapter") == 0 {
			s.LoraName = proto.String("l")
			for i := range s.BlockHashes {
				s.BlockHashes[i] |= 1 << 40
			}
		}
		for _, d := range digits {
			s.TokenIds = append(s.TokenIds, d, d+10)
		}
		s.TokensHashes = kvblock.AppendTokensHashes(nil, s.GetTokenIds(), 2, kvblock.Seed(s.GetLoraName(), ""), false, nil)
		event.Event = &kvcastv1.RouterEvent_Stored{Stored: s}
	}
	e.apply(event)
}

// remove removes a block, unless its children are in the tier and strict is set.
func (e *engine) remove(tier kvcastv1.Tier, gone uint64, strict bool) {
	for child := gone * 4; strict && child < gone*4+4; child++ {
		if slices.Contains(e.index.Tiers("w", 0, child), tier) {
			return
		}
	}
	e.apply(&kvcastv1.RouterEvent{DpRank: proto.Uint32(0), Tier: tier, Event: &kvcastv1.RouterEvent_Removed{Removed: &kvcastv1.Removed{BlockHashes: []uint64{gone}}}})
}

// publish makes the stream apply pending entries, up to some number, and returns a batch for each that has events.
func (e *engine) publish(most int) (all []vllm.Batch) {
	for ; most > 0 && len(e.pending) > 0; most-- {
		e.stream.Apply(e.pending[0])
		e.pending = e.pending[1:]
		if e.stream.Empty() {
			continue
		}
		payload, seq := e.stream.Batch(1)
		all = append(all, vllm.Batch{Stream: e.stream, Seq: seq, Payload: payload})
	}
	return all
}

// state returns the batches of the stream's state from a seq on.
func (e *engine) state(from uint64, fill bool) (all []vllm.Batch) {
	state := e.stream.State(from, fill)
	s, ok := e.index.Snapshot("w")
	if !ok {
		e.t.Fatal("no worker")
	}
	s.TokenIDs = true
	for piece := range s.RankBlocks(e.t.Context(), 0, kvblock.AllEvents) {
		var blocks kvcastv1.SnapshotBlocks
		if err := proto.Unmarshal(piece, &blocks); err != nil {
			e.t.Fatal(err)
		}
		for _, event := range blocks.GetEvents() {
			all = state.Apply(event, 1, all)
		}
	}
	return state.End(1, all)
}

// blocks returns what the index holds now.
func (e *engine) blocks() held {
	all := make(held)
	s, _ := e.index.Snapshot("w")
	for piece := range s.Blocks(e.t.Context(), kvblock.AllEvents) {
		var blocks kvcastv1.SnapshotBlocks
		if err := proto.Unmarshal(piece, &blocks); err != nil {
			e.t.Fatal(err)
		}
		for _, event := range blocks.GetEvents() {
			for _, hash := range event.GetStored().GetBlockHashes() {
				all[hash] |= 1 << event.GetTier()
			}
		}
	}
	return all
}

func (h held) String() string {
	text := ""
	for _, hash := range slices.Sorted(maps.Keys(h)) {
		text += fmt.Sprintf("%d:%b ", hash, h[hash])
	}
	return text
}
