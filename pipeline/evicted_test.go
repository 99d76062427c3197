package pipeline_test

import (
	"slices"
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
	keyed, withAdapter := gpu("\x91\x91\xa1a"), in("CPU") // [["a"]]
	keyed.LoRAName, withAdapter.LoRAName = "a", "a"
	const (
		none   = "\x91\xc0"                     // [nil]
		salt   = "\x91\x91\xa1s"                // [["s"]]
		image  = "\x91\x91\x92\xa3img\x00"      // [[["img", 0]]]
		salted = "\x91\x92\xa1s\x92\xa3img\x00" // [["s", ["img", 0]]]
		embeds = "\x91\x91\xc4\x02\x01\x02"     // [[bytes]]
	)
	withImage := gpu(image)
	const device, host = 0, 1
	for name, c := range map[string]struct {
		events []wire.Event
		exact  []int // the tiers of which the prompt is an exact match
		salted []int // and with the salt, or the adapter
	}{
		"copied":                                     {[]wire.Event{other, gpu(none), copied}, []int{device, host}, nil},
		"copied and evicted":                         {[]wire.Event{other, gpu(none), copied, evicted}, []int{host}, nil},
		"evicted, then copied":                       {[]wire.Event{other, copy99(other), gpu(none), evicted, copied}, []int{host}, nil},
		"not known":                                  {[]wire.Event{other, copied}, nil, nil},
		"an image":                                   {[]wire.Event{other, withImage, copied}, nil, nil},
		"an image, copied and evicted":               {[]wire.Event{other, withImage, copied, evicted}, nil, nil},
		"an image, evicted, then copied":             {[]wire.Event{other, copy99(other), withImage, evicted, copied}, nil, nil},
		"an image, in a file":                        {[]wire.Event{other, withImage, in("STORAGE")}, nil, nil},
		"an image, in a file, evicted":               {[]wire.Event{other, withImage, copied, evicted, in("STORAGE")}, nil, nil},
		"an image, by Mooncake's connector":          {[]wire.Event{other, withImage, mooncake}, nil, nil},
		"embeddings":                                 {[]wire.Event{other, gpu(embeds), copied}, nil, nil},
		"embeddings, copied and evicted":             {[]wire.Event{other, gpu(embeds), copied, evicted}, nil, nil},
		"a salt":                                     {[]wire.Event{other, gpu(salt), copied}, nil, []int{device, host}},
		"a salt, of which a restart is between":      {[]wire.Event{other, gpu(salt), copied, restart, other, copied}, nil, nil},
		"an adapter, by Mooncake's connector":        {[]wire.Event{other, adapter, mooncake}, nil, []int{device}},
		"a salt, evicted, then copied":               {[]wire.Event{other, copy99(other), gpu(salt), evicted, copied}, nil, []int{host}},
		"a salt and an image, evicted, then copied":  {[]wire.Event{other, copy99(other), gpu(salted), evicted, copied}, nil, nil},
		"an adapter among the keys, evicted, copied": {[]wire.Event{other, copy99(other), keyed, evicted, withAdapter}, nil, []int{host}},
		"never held, and removed":                    {[]wire.Event{other, copy99(other), evicted, copied}, nil, nil},
		"cleared, then copied":                       {[]wire.Event{other, copy99(other), gpu(none), {Kind: wire.KindCleared, Medium: "GPU"}, copied}, []int{host}, nil},
		"not known, then with a salt":                {[]wire.Event{other, copied, gpu(salt)}, nil, []int{device}},
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
			s.journal.index.Match(&index.Query{Model: "m", Prompts: []index.Prompt{{TokenIDs: tokens}, {TokenIDs: tokens, Salt: "s"}, {TokenIDs: tokens, LoRA: "a"}}}, &m)
			exact := func(prompts ...[]index.Match) (tiers []int) {
				for _, f := range slices.Concat(prompts...) {
					for tier := range kvblock.NumTiers {
						if f.TierBlocks[tier] > 0 && f.TierTrust(tier) == kvcastv1.Trust_TRUST_EXACT {
							tiers = append(tiers, tier)
						}
					}
				}
				return tiers
			}
			if got, salted := exact(m.Prompts[0]), exact(m.Prompts[1:]...); !slices.Equal(got, c.exact) || !slices.Equal(salted, c.salted) {
				t.Errorf("exact in tiers %v, and with the salt or the adapter %v; want %v and %v", got, salted, c.exact, c.salted)
			}
		})
	}
}

// copy99 returns a copy of a block in host memory, so that the rank is known to have some.
func copy99(e wire.Event) wire.Event { e.Medium = "CPU"; return e }
