package hybrid_test

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/index/hybrid"
	"github.com/kvcast/kvcast/internal/core/index/hybrid/vllmhash"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/recording"
	"github.com/kvcast/kvcast/internal/wire"
)

// recordingsDir contains recordings of vLLM with several attention groups or a host tier; ../README.md describes them.
const recordingsDir = "../../cmd/kvcast/testdata/captures/hybrid"

// recordings are the recordings, and the number of their probes.
var recordings = []struct {
	name   string
	probes int
	// quick reports whether the recording is also played where tests are not of full size.
	quick bool
}{
	{name: "a_oss_incremental", probes: 174},
	{name: "a_oss_pressure", probes: 174},
	{name: "a_oss_reset_restart", probes: 168, quick: true},
	{name: "a_oss_window40", probes: 174},
	{name: "b_full16_swa64_swa32", probes: 174, quick: true},
	{name: "b_full32_swa16", probes: 174},
	{name: "c_gemma_5to1", probes: 178},
	{name: "d_full16_mamba256", probes: 166},
	{name: "d_qwen_full64_3mamba64", probes: 166},
	{name: "d_qwen_unit16", probes: 166, quick: true},
	{name: "e_kimi_mla_kda", probes: 166},
	{name: "f_llama4_chunked", probes: 174, quick: true},
	{name: "g_dsv4", probes: 158, quick: true},
	{name: "h_mamba_only", probes: 166},
	{name: "h_swa_only", probes: 174, quick: true},
	{name: "i_eagle_drop_oss", probes: 166, quick: true},
	{name: "i_mtp_drop_qwen", probes: 166},
	{name: "j_dp2_oss", probes: 174},
	{name: "k_oss_mixed", probes: 174},
	{name: "k_qwen_mixed", probes: 166, quick: true},
	{name: "l_cpu_full_report_full", probes: 174},
	{name: "l_cpu_oss", probes: 174, quick: true},
	{name: "l_cpu_qwen", probes: 166},
}

// oracle is what a recording says about its engine.
type oracle struct {
	HashBlockSize int   `json:"hash_block_size"`
	EAGLE         bool  `json:"eagle"`
	EAGLEGroups   []int `json:"eagle_groups"` // nil: all
	Groups        []struct {
		Index int  `json:"group_idx"`
		Chunk *int `json:"chunk"`
	} `json:"groups"`
	Engines map[string]struct {
		Checkpoints []checkpoint `json:"checkpoints"`
	} `json:"engines"`
}

// checkpoint is the engine's own report after a batch.
type checkpoint struct {
	// Labels has a letter for each event of the batch: s for a store, a for one that only announces blocks again, which a request
	// reuses (report mode full), r for a remove, c for a clear.
	Labels string `json:"labels"`
	// SHA256ByGroup are the beginnings of the digests of each group's blocks in device memory.
	SHA256ByGroup map[string]string `json:"sha256_by_group"`
}

// probe is a prompt, and what the engine would have reused of it after a batch.
type probe struct {
	AfterBatch int      `json:"after_batch"` // number of the recording's message, from 0
	Engine     string   `json:"engine"`      // e and the dp rank
	Tokens     []uint32 `json:"tokens"`
	LoRA       string   `json:"lora"`
	Salt       string   `json:"salt"`
	HitTokens  int      `json:"hit_tokens"` // in device memory
	Effective  int      `json:"effective"`  // the same without the prompt's last token
	CPUExtra   int      `json:"cpu_extra"`  // in host memory, after Effective
}

// readJSON reads the values of a gzipped file.
func readJSON[T any](t *testing.T, file string) (all []T) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatalf("read %s: %v", file, err)
	}
	for values := json.NewDecoder(z); ; {
		var v T
		if err := values.Decode(&v); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatalf("read %s: value %d: %v", file, len(all), err)
		}
		all = append(all, v)
	}
}

// place is a tier of a group.
type place struct {
	tier  string // the medium
	group int
}

const (
	device = "GPU"
	host   = "CPU"
)

// engine is what the events of a dp rank tell about it. It is the least that the recordings need: it counts copies of blocks, and takes
// from the oracle's labels which stores are announcements, which the events do not say.
type engine struct {
	t           *testing.T
	oracle      *oracle
	checkpoints []checkpoint // that are to come
	seq         string
	digests     map[string]string // SHA256ByGroup of the last checkpoint
	copies      map[place]map[uint64]int
	groups      []hybrid.Group
	// partial are the groups that have stored parts of blocks, which the oracle's digests leave out.
	partial map[int]bool
	rule    *hybrid.Rule // nil: groups have changed
	unit    *int         // of all ranks; 0: not found yet
}

// play applies a batch.
func (e *engine) play(seq string, b *wire.Batch) {
	e.t.Helper()
	if seq <= e.seq { // the engine restarted
		clear(e.copies)
	}
	e.seq = seq
	c := e.checkpoints[0]
	e.checkpoints = e.checkpoints[1:]
	if len(b.Events) != len(c.Labels) {
		e.t.Fatalf("%d events with %d labels", len(b.Events), len(c.Labels))
	}
	for i := range b.Events {
		e.apply(&b.Events[i], c.Labels[i] == 'a')
	}
	e.digests = c.SHA256ByGroup
}

// check compares the blocks with the engine's after the last batch.
func (e *engine) check() {
	e.t.Helper()
	for group, want := range e.digests {
		g, err := strconv.Atoi(group)
		if err != nil {
			e.t.Fatal(err)
		}
		if got := digest(e.copies[place{device, g}]); !e.partial[g] && !strings.HasPrefix(got, want) {
			e.t.Fatalf("the blocks of group %d are not the engine's", g)
		}
	}
}

// digest returns the digest of the blocks of a group in the oracle's form.
func digest(blocks map[uint64]int) string {
	var names []string
	for _, hash := range slices.Sorted(maps.Keys(blocks)) {
		names = append(names, strconv.FormatUint(hash, 10))
	}
	sum := sha256.Sum256([]byte(strings.Join(names, "\n")))
	return hex.EncodeToString(sum[:])
}

func (e *engine) apply(ev *wire.Event, announces bool) {
	at := place{ev.Medium, int(ev.GroupIdx)}
	if at.tier == "" {
		at.tier = device
	}
	switch ev.Kind {
	case wire.KindCleared: // of device memory
		maps.DeleteFunc(e.copies, func(p place, _ map[uint64]int) bool { return p.tier == device })
	case wire.KindRemoved:
		for _, hash := range ev.BlockHashes {
			if e.copies[at][hash]--; e.copies[at][hash] <= 0 {
				delete(e.copies[at], hash)
			}
		}
	case wire.KindStored:
		if at.tier == device {
			e.learn(ev)
		}
		if announces {
			return
		}
		if e.copies[at] == nil {
			e.copies[at] = make(map[uint64]int)
		}
		for _, hash := range ev.BlockHashes {
			e.copies[at][hash]++
		}
	}
}

// learn learns the store's group and the engine's hash unit.
func (e *engine) learn(ev *wire.Event) {
	e.t.Helper()
	i := slices.IndexFunc(e.groups, func(g hybrid.Group) bool { return g.Index == int(ev.GroupIdx) })
	if i < 0 {
		i, e.rule = len(e.groups), nil
		e.groups = append(e.groups, e.group(ev))
	}
	if g := &e.groups[i]; g.BlockSize != int(ev.BlockSize) { // this store is of a partial block, or those before were
		e.partial[g.Index] = true
		g.BlockSize, e.rule = max(g.BlockSize, int(ev.BlockSize)), nil
	}
	if *e.unit > 0 || ev.HasParent || len(ev.BlockHashes) == 0 {
		return
	}
	s := vllmhash.Store{Tokens: ev.Tokens, BlockSize: int(ev.BlockSize), Hashes: ev.BlockHashes, Content: content(ev.LoRAName, "")}
	unit, err := vllmhash.FindUnit(vllmhash.SHA256, vllmhash.DefaultSeed, s)
	if errors.Is(err, vllmhash.ErrNoUnit) { // the store has a salt
		return
	}
	if err != nil || unit != e.oracle.HashBlockSize {
		e.t.Fatalf("got hash unit %d, %v, want %d", unit, err, e.oracle.HashBlockSize)
	}
	*e.unit = unit
}

// group returns a store's group. What is not in events is configured.
func (e *engine) group(ev *wire.Event) hybrid.Group {
	e.t.Helper()
	kind, ok := hybrid.KindOf(ev.SpecKind)
	if !ok {
		e.t.Fatalf("kind %q unknown", ev.SpecKind)
	}
	g := hybrid.Group{Index: int(ev.GroupIdx), Kind: kind, BlockSize: int(ev.BlockSize)}
	if ev.Rare != nil {
		g.Window = int(ev.Rare.SlidingWindow)
	}
	for _, configured := range e.oracle.Groups {
		if configured.Index == g.Index && configured.Chunk != nil {
			g.Chunk = *configured.Chunk
		}
	}
	g.Drops = e.oracle.EAGLE && (e.oracle.EAGLEGroups == nil || slices.Contains(e.oracle.EAGLEGroups, g.Index))
	return g
}

// content returns the content of prompts. All adapters of the recordings are in one directory.
func content(lora, salt string) vllmhash.Content {
	c := vllmhash.Content{LoRAName: lora, CacheSalt: salt}
	if lora != "" {
		c.LoRAPath = "/adapters/" + lora
	}
	return c
}

// reuse is how much of a prompt an engine reuses: of device memory, the same without the prompt's last token, and then of both tiers.
type reuse struct{ hit, effective, all int }

// holderFunc reports whether a group holds the prefix of a number of tokens.
type holderFunc func(group, tokens int) bool

// Held implements hybrid.Holder.
func (f holderFunc) Held(group, from, step, n int) (held uint64) {
	for i := range n {
		if f(group, from+(i+1)*step) {
			held |= 1 << i
		}
	}
	return held
}

// ask computes how much of a probe's prompt the engine reuses.
func (e *engine) ask(p *probe) reuse {
	e.t.Helper()
	if *e.unit == 0 {
		e.t.Fatal("the hash unit is not known yet")
	}
	if e.rule == nil {
		rule, err := hybrid.New(e.groups, *e.unit)
		if err != nil {
			e.t.Fatal(err)
		}
		e.rule = &rule
	}
	h, err := vllmhash.New(vllmhash.SHA256, vllmhash.DefaultSeed, *e.unit)
	if err != nil {
		e.t.Fatal(err)
	}
	names, err := h.Append(nil, p.Tokens, content(p.LoRA, p.Salt), new(vllmhash.Buffer))
	if err != nil {
		e.t.Fatal(err)
	}
	holder := func(tier string) hybrid.Holder {
		return holderFunc(func(group, tokens int) bool { return e.copies[place{tier, group}][names[tokens / *e.unit - 1]] > 0 })
	}
	hashed := len(names) * *e.unit
	var r reuse
	r.hit, _ = e.rule.Longest(holder(device), len(p.Tokens), hashed)
	r.effective, _ = e.rule.Longest(holder(device), len(p.Tokens)-1, hashed)
	r.all = e.rule.LongestWithHost(holder(host), r.effective, len(p.Tokens)-1, hashed)
	return r
}

// TestRuleIsTheEnginesAnswer plays recordings, and after the batches after which the engine was asked for prompts, compares the rule with
// its answers. The oracle's labels tell announcements from copies: how to do so by events is not tested here.
func TestRuleIsTheEnginesAnswer(t *testing.T) {
	testclass.WithoutRace(t)
	for _, r := range recordings {
		if !r.quick && !testclass.Full() {
			continue
		}
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			got := playRecording(t, filepath.Join(recordingsDir, r.name))
			if want := (outcomes{exact: r.probes}); got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
		})
	}
}

// outcomes are numbers of probes: of those for which the rule differs, over has those with a longer prefix than the engine's.
type outcomes struct{ exact, over, under int }

// playRecording plays a recording, and asks the rule for each of its probes.
func playRecording(t *testing.T, dir string) (o outcomes) {
	t.Helper()
	oracle := &readJSON[oracle](t, filepath.Join(dir, "oracle.json.gz"))[0]
	engines, unit := make(map[string]*engine), 0
	for name, e := range oracle.Engines {
		engines[name] = &engine{t: t, oracle: oracle, checkpoints: e.Checkpoints, unit: &unit,
			copies: make(map[place]map[uint64]int), partial: make(map[int]bool)}
	}
	probes := readJSON[probe](t, filepath.Join(dir, "probes.jsonl.gz"))
	var decoder wire.Decoder
	batch := 0
	for frames, err := range recording.ReadFile(filepath.Join(dir, "frames.jsonl.gz")) {
		if err != nil {
			t.Fatal(err)
		}
		b, err := decoder.Decode(frames[2])
		if err != nil || len(b.Skipped) > 0 {
			t.Fatalf("batch %d: %v, skipped %v", batch, err, b.Skipped)
		}
		e := engines[fmt.Sprintf("e%d", b.Rank)]
		e.play(string(frames[1]), b)
		if len(probes) > 0 && probes[0].AfterBatch == batch {
			e.check()
		}
		for ; len(probes) > 0 && probes[0].AfterBatch == batch; probes = probes[1:] {
			p := &probes[0]
			got, want := engines[p.Engine].ask(p), reuse{p.HitTokens, p.Effective, p.Effective + p.CPUExtra}
			if o.add(got, want) {
				continue
			}
			t.Errorf("after batch %d: %d tokens, LoRA %q, salt %q: got %+v, want %+v", batch, len(p.Tokens), p.LoRA, p.Salt, got, want)
		}
		batch++
	}
	if len(probes) > 0 {
		t.Errorf("%d probes are of no batch", len(probes))
	}
	return o
}

// add counts a probe, and reports whether it is exact.
func (o *outcomes) add(got, want reuse) bool {
	switch {
	case got == want:
		o.exact++
	case got.hit > want.hit || got.effective > want.effective || got.all > want.all:
		o.over++
	default:
		o.under++
	}
	return got == want
}
