package pipeline_test

import (
	"testing"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// TestCopiesWithUntoldInputs has stores of vLLM's connectors, which tell neither salts nor images, of blocks that had some or had none. A prompt of their tokens
// alone may be an exact match only of blocks that had none.
func TestCopiesWithUntoldInputs(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4}
	gpu := func(keys string) wire.Event {
		e := wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{11}, Tokens: tokens, BlockSize: 4, Medium: "GPU", HasGroupIdx: true, SpecKind: "full_attention"}
		if keys != "" {
			e.Raw = &wire.Raw{ExtraKeys: []byte(keys)}
		}
		return e
	}
	in := func(medium string) wire.Event { e := gpu(""); e.Medium = medium; return e }
	other := gpu("")
	other.BlockHashes, other.Tokens = []uint64{99}, []uint32{9, 9, 9, 9}
	adapter, mooncake := gpu(""), in("cpu")
	adapter.LoRAName, mooncake.HasGroupIdx, mooncake.SpecKind = "a", false, ""
	evicted := wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{11}, Medium: "GPU", HasGroupIdx: true}
	restart, copied := wire.Event{}, in("CPU")
	const (
		none   = "\x91\xc0"                 // [nil]
		salt   = "\x91\x91\xa1s"            // [["s"]]
		image  = "\x91\x91\x92\xa3img\x00"  // [[["img", 0]]]
		embeds = "\x91\x91\xc4\x02\x01\x02" // [[bytes]]
	)
	withImage := gpu(image)
	const device, host = 0, 1
	for name, c := range map[string]struct {
		events []wire.Event
		exact  []int // the tiers of which the prompt is an exact match
	}{
		"copied":                                {[]wire.Event{other, gpu(none), copied}, []int{device, host}},
		"copied and evicted":                    {[]wire.Event{other, gpu(none), copied, evicted}, []int{host}},
		"evicted, then copied":                  {[]wire.Event{other, copy99(other), gpu(none), evicted, copied}, []int{host}},
		"not known":                             {[]wire.Event{other, copied}, nil},
		"an image":                              {[]wire.Event{other, withImage, copied}, nil},
		"an image, copied and evicted":          {[]wire.Event{other, withImage, copied, evicted}, nil},
		"an image, evicted, then copied":        {[]wire.Event{other, copy99(other), withImage, evicted, copied}, nil},
		"an image, in a file":                   {[]wire.Event{other, withImage, in("STORAGE")}, nil},
		"an image, in a file, evicted":          {[]wire.Event{other, withImage, copied, evicted, in("STORAGE")}, nil},
		"an image, by Mooncake's connector":     {[]wire.Event{other, withImage, mooncake}, nil},
		"embeddings":                            {[]wire.Event{other, gpu(embeds), copied}, nil},
		"embeddings, copied and evicted":        {[]wire.Event{other, gpu(embeds), copied, evicted}, nil},
		"a salt":                                {[]wire.Event{other, gpu(salt), copied}, nil},
		"a salt, of which a restart is between": {[]wire.Event{other, gpu(salt), copied, restart, other, copied}, nil},
		"an adapter, by Mooncake's connector":   {[]wire.Event{other, adapter, mooncake}, nil},
		"not known, then with a salt":           {[]wire.Event{other, copied, gpu(salt)}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := newSubject(pipeline.Config{})
			if err != nil {
				t.Fatal(err)
			}
			rules := wire.NewRules(&wire.BlockSize{Tokens: 4})
			rules.IsVLLM, rules.ClearsDevice = true, true
			s.add(feed.Worker{Name: testWorker, Model: "m", BlockSize: 4})
			for n, e := range c.events {
				if e.Kind == 0 {
					s.restarted(testWorker, feed.Restart{At: 1})
					rules.Reset(0)
					continue
				}
				b := &wire.Batch{Events: []wire.Event{e}}
				rules.Admit(b, 0, new(wire.Counts))
				s.batch(testWorker, feed.Batch{Seq: uint64(n), IngestTime: int64(n) + 1, CopyRule: feed.CopyRuleDetected, Events: b.Events, GroupsOmitted: b.GroupsOmitted, Doubts: doubtsOf(b)})
			}
			var m index.Matches
			s.journal.index.Match(&index.Query{Model: "m", Prompts: []index.Prompt{{TokenIDs: tokens}}}, &m)
			exact := map[int]bool{}
			for _, f := range m.Prompts[0] {
				for tier := range kvblock.NumTiers {
					if f.TierBlocks[tier] > 0 && f.TierTrust(tier) == kvcastv1.Trust_TRUST_EXACT {
						exact[tier] = true
					}
				}
			}
			for _, tier := range c.exact {
				if !exact[tier] {
					t.Errorf("tier %d is not an exact match", tier)
				}
				delete(exact, tier)
			}
			if len(exact) > 0 {
				t.Errorf("tiers %v are exact matches", exact)
			}
		})
	}
}

// copy99 returns a copy of a block in host memory, so that the rank is known to have some.
func copy99(e wire.Event) wire.Event { e.Medium = "CPU"; return e }
