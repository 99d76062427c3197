package index_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

func at(seconds int) time.Time { return time.Unix(int64(seconds), 0) }

// routedPrompt is a prompt that a rank is expected to store.
type routedPrompt struct {
	worker string
	rank   uint32
	prompt []uint64
	until  int
}

// TestRoutedPromptsAreExpected compares an index with routed prompts with one without, and what is expected with a model: the
// longest prefix of a prompt that was routed to a rank, until it has stored the last block, was cleared or added again, or the time has come.
func TestRoutedPromptsAreExpected(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x, plain := index.New(), index.New()
		var routed []routedPrompt
		seq, now := uint64(0), 0
		apply := func(worker, model string, events ...*kvcastv1.RouterEvent) {
			seq++
			e := &kvcastv1.Entry{Seq: seq, Worker: worker, Model: model, Events: events}
			x.ApplyEntry(e)
			plain.ApplyEntry(e)
		}
		models := map[string]string{"a": "m", "b": "m", "c": "n"}
		add := func(worker string) {
			apply(worker, models[worker], &kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerAdded{
				WorkerAdded: &kvcastv1.WorkerAdded{Model: models[worker], BlockSize: 2, Ranks: []uint32{0, 1}},
			}})
		}
		for worker := range models {
			add(worker)
		}
		workers, ranks := rapid.SampledFrom([]string{"a", "b", "c"}), rapid.Uint32Range(0, 1)
		prompts := rapid.SliceOfN(rapid.Uint64Range(1, 3), 1, 5)
		end := func(ends func(routedPrompt) bool) { routed = slices.DeleteFunc(routed, ends) }
		var m, p index.Matches
		t.Repeat(map[string]func(*rapid.T){
			"route": func(t *rapid.T) {
				r := routedPrompt{workers.Draw(t, "worker"), ranks.Draw(t, "rank"), prompts.Draw(t, "prompt"), now + rapid.IntRange(1, 5).Draw(t, "seconds")}
				if !x.NoteRouted("", r.worker, r.rank, &index.Prompt{TokensHashes: r.prompt}, at(now), at(r.until)) {
					t.Fatal("not noted")
				}
				routed = append(routed, r)
			},
			"store": func(t *rapid.T) {
				worker, rank, prompt := workers.Draw(t, "worker"), ranks.Draw(t, "rank"), prompts.Draw(t, "prompt")
				s := &kvcastv1.Stored{BlockSize: 2, TokensHashes: prompt}
				for i := range prompt {
					s.BlockHashes = append(s.BlockHashes, hashOf(prompt[:i+1]))
				}
				apply(worker, models[worker], event(rank, s))
				end(func(r routedPrompt) bool {
					return r.worker == worker && r.rank == rank && slices.Contains(prompt, r.prompt[len(r.prompt)-1])
				})
			},
			"clear": func(t *rapid.T) {
				worker, rank := workers.Draw(t, "worker"), ranks.Draw(t, "rank")
				apply(worker, models[worker], &kvcastv1.RouterEvent{DpRank: &rank, Event: &kvcastv1.RouterEvent_Cleared{Cleared: &kvcastv1.Cleared{}}})
				end(func(r routedPrompt) bool { return r.worker == worker && r.rank == rank })
			},
			"add again": func(t *rapid.T) {
				worker := workers.Draw(t, "worker")
				add(worker)
				end(func(r routedPrompt) bool { return r.worker == worker })
			},
			"wait": func(t *rapid.T) {
				now += rapid.IntRange(1, 3).Draw(t, "seconds")
				end(func(r routedPrompt) bool { return r.until <= now })
			},
			"": func(t *rapid.T) {
				prompt := prompts.Draw(t, "matched")
				q := &index.Query{
					Model: rapid.SampledFrom([]string{"", "m"}).Draw(t, "model"), Prompts: []index.Prompt{{TokensHashes: prompt}}, Now: at(now),
					Walk: rapid.Bool().Draw(t, "walk"),
				}
				plain.Match(q, &p)
				want := slices.Clone(p.Prompts[0])
				for worker, model := range models {
					for rank := range uint32(2) {
						expected := 0
						for _, r := range routed {
							if r.worker == worker && r.rank == rank {
								expected = max(expected, commonLength(r.prompt, prompt))
							}
						}
						i := slices.IndexFunc(want, func(o index.Match) bool { return o.Worker == worker && o.Rank == rank })
						switch {
						case expected == 0 || q.Model != "" && q.Model != model:
						case i < 0:
							want = append(want, index.Match{Worker: worker, Model: model, Rank: rank, BlockSize: 2, Expected: uint32(expected)})
						case expected > want[i].Blocks:
							want[i].Expected = uint32(expected)
						}
					}
				}
				slices.SortFunc(want, func(a, b index.Match) int {
					if n := max(b.Blocks, int(b.Expected)) - max(a.Blocks, int(a.Expected)); n != 0 {
						return n
					}
					if n := b.TierBlocks[0] - a.TierBlocks[0]; n != 0 {
						return n
					}
					return strings.Compare(fmt.Sprint(a.Worker, a.Rank), fmt.Sprint(b.Worker, b.Rank))
				})
				for _, limit := range []int{0, rapid.IntRange(1, 7).Draw(t, "limit")} {
					if q.Limit = limit; limit > 0 {
						want = want[:min(len(want), limit)]
					}
					x.Match(q, &m)
					if diff := cmp.Diff(want, m.Prompts[0], cmpopts.IgnoreUnexported(index.Match{}), cmpopts.EquateEmpty()); diff != "" {
						t.Fatalf("matches, limit %d (-want +got):\n%s", limit, diff)
					}
				}
			},
		})
	})
}

func commonLength(a, b []uint64) (n int) {
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}

// hashOf returns a block hash for a path of tokens hashes from 1 to 3.
func hashOf(path []uint64) (hash uint64) {
	for _, h := range path {
		hash = hash*4 + h
	}
	return hash
}
