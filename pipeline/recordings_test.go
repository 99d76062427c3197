package pipeline_test

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/recording"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// recordingsDir contains the recordings, each with an oracle of the engine's blocks after
// every batch.
const recordingsDir = "../cmd/kvcast/testdata/captures"

// recordedBatch is one batch of a recording.
type recordedBatch struct {
	seq     uint64
	payload []byte
	// restart reports whether the engine restarted before this batch.
	restart bool
	oracle  recordedState
}

// recordedState is the engine's own report of its blocks after a batch.
type recordedState struct {
	Len    int    `json:"len"`
	SHA256 string `json:"sha256"`
	// SHA256ByGroup are the beginnings of the digests of each attention group's blocks, if the recording has them.
	SHA256ByGroup map[string]string `json:"sha256_by_group"`
	// HostLen and HostSHA256 are those of the host tier.
	HostLen    int    `json:"host_len"`
	HostSHA256 string `json:"host_sha256"`
	// Labels has a letter for each event of the batch: s for a store, a for a store
	// that announces blocks again, r for a remove, c for a clear. Only vLLM's
	// recordings have them.
	Labels string `json:"labels"`
}

// readRecording returns the batches of a recording, and the engine's block size.
func readRecording(t *testing.T, name string) (batches []recordedBatch, blockSize uint32) {
	t.Helper()
	f, err := os.Open(filepath.Join(recordingsDir, name, "oracle.json.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var oracle struct {
		BlockSize uint32 `json:"block_size"`
		Engines   map[string]struct {
			Checkpoints []recordedState `json:"checkpoints"`
		} `json:"engines"`
	}
	if err := json.NewDecoder(z).Decode(&oracle); err != nil {
		t.Fatalf("read oracle of %s: %v", name, err)
	}
	for frames, err := range recording.ReadFile(filepath.Join(recordingsDir, name, "frames.jsonl.gz")) {
		if err != nil {
			t.Fatal(err)
		}
		b := recordedBatch{seq: binary.BigEndian.Uint64(frames[1]), payload: frames[2]}
		b.restart = len(batches) > 0 && b.seq <= batches[len(batches)-1].seq
		batches = append(batches, b)
	}
	states := oracle.Engines["e0"].Checkpoints
	if len(states) != len(batches) {
		t.Fatalf("recording %s: %d states for %d batches", name, len(states), len(batches))
	}
	for i := range batches {
		batches[i].oracle = states[i]
	}
	return batches, oracle.BlockSize
}

// blocksDigest returns the digest of a set of blocks in the oracle's form.
func blocksDigest(blocks map[uint64]bool) string {
	var ids []string
	for _, h := range slices.Sorted(maps.Keys(blocks)) {
		ids = append(ids, strconv.FormatUint(h, 10))
	}
	sum := sha256.Sum256([]byte(strings.Join(ids, "\n")))
	return hex.EncodeToString(sum[:])
}

// labelledPool is a vLLM pool's main attention group, replayed by the labels.
type labelledPool struct{ copies map[uint64]int }

// apply applies a batch, and returns the pool's blocks.
func (p *labelledPool) apply(t *testing.T, b recordedBatch, blockSize uint32) map[uint64]bool {
	t.Helper()
	if p.copies == nil || b.restart {
		p.copies = make(map[uint64]int)
	}
	var d wire.Decoder
	batch, err := d.Decode(b.payload)
	if err != nil {
		t.Fatal(err)
	}
	if len(batch.Events) != len(b.oracle.Labels) {
		t.Fatalf("seq %d: %d labels for %d events", b.seq, len(b.oracle.Labels), len(batch.Events))
	}
	for i, e := range batch.Events {
		switch label := b.oracle.Labels[i]; {
		case label == 'c':
			clear(p.copies)
		case e.GroupIdx != 0 || e.Medium == "CPU":
		case label == 's' && e.BlockSize == blockSize:
			for _, h := range e.BlockHashes {
				p.copies[h]++
			}
		case label == 'r':
			for _, h := range e.BlockHashes {
				if p.copies[h]--; p.copies[h] <= 0 {
					delete(p.copies, h)
				}
			}
		}
	}
	present := make(map[uint64]bool)
	for h := range p.copies {
		present[h] = true
	}
	return present
}

// score compares the blocks derived from a recording with the engine's own, batch by batch.
type score struct {
	batches, exact        int
	missing, missingAtEnd int // at most
	extra, extraAtEnd     int
}

// add adds a batch, and reports whether the blocks are equal.
func (s *score) add(want, got map[uint64]bool) (equal bool) {
	missing, extra := 0, 0
	for h := range want {
		if !got[h] {
			missing++
		}
	}
	for h := range got {
		if !want[h] {
			extra++
		}
	}
	if missing == 0 && extra == 0 {
		s.exact++
	}
	s.batches++
	s.missing, s.missingAtEnd = max(s.missing, missing), missing
	s.extra, s.extraAtEnd = max(s.extra, extra), extra
	return missing+extra == 0
}

func (s score) String() string {
	return fmt.Sprintf("%d of %d batches exact, at most %d missing (%d at the end), at most %d extra (%d at the end)",
		s.exact, s.batches, s.missing, s.missingAtEnd, s.extra, s.extraAtEnd)
}

// recordingPlayer passes the batches of a recording to a target, in the form that ingest
// decodes.
type recordingPlayer struct {
	target
	decoder   wire.Decoder
	rules     *wire.Rules
	blockSize wire.BlockSize
}

// newRecordingPlayer adds a worker whose first source is the recording.
func newRecordingPlayer(to target, blockSize wire.BlockSize, sources ...feed.Engine) *recordingPlayer {
	p := &recordingPlayer{target: to, blockSize: blockSize}
	p.rules = wire.NewRules(&p.blockSize)
	p.rules.ClearsDevice = true
	to.add(feed.Worker{Name: testWorker, Model: "m", BlockSize: blockSize.Tokens, Sources: sources})
	return p
}

func (p *recordingPlayer) play(t *testing.T, b recordedBatch) {
	t.Helper()
	if b.restart {
		p.restarted(testWorker, feed.Restart{At: 1})
		p.rules.Reset(0)
		p.blockSize.Forget()
	}
	batch, err := p.decoder.Decode(b.payload)
	if err != nil {
		t.Fatal(err)
	}
	p.rules.Admit(batch, 0, new(wire.Counts))
	p.batch(testWorker, feed.Batch{Seq: b.seq, IngestTime: int64(b.seq) + 1, CopyRule: feed.CopyRuleDetected,
		Events: batch.Events, GroupsOmitted: batch.GroupsOmitted, Doubts: doubtsOf(batch)})
}

// doubtsOf returns the doubts of a batch as ingest passes them on.
func doubtsOf(b *wire.Batch) (all []feed.Doubt) {
	for reason, tiers := range b.Doubts {
		if tiers != 0 {
			all = append(all, feed.Doubt{Reason: feed.GapReason(wire.Reason(reason).Gap()), Tiers: tiers})
		}
	}
	return all
}

// blocksIn returns the router's blocks of the test's worker in a tier.
func (r *router) blocksIn(tier kvblock.Tier) map[uint64]bool {
	return r.blocks[place{testWorker, 0, kvcastv1.Tier(tier)}]
}

// playRecording plays a recording into a pipeline, and scores a router's blocks after each
// batch. The block size is the engine's; it may be configured, or learned.
func playRecording(t *testing.T, batches []recordedBatch, blockSize uint32, configured bool, sources ...feed.Engine) (s score) {
	t.Helper()
	subject, err := newSubject(pipeline.Config{})
	if err != nil {
		t.Fatal(err)
	}
	size := wire.BlockSize{}
	if configured {
		size = wire.BlockSize{Tokens: blockSize, Configured: true}
	}
	p := newRecordingPlayer(subject, size, sources...)
	m := newModel(pipeline.Config{}, nil)
	reference := newRecordingPlayer(m, size, sources...)
	r := newRouter()
	pool := &labelledPool{}
	for _, b := range batches {
		p.play(t, b)
		reference.play(t, b)
		r.apply(subject.journal.all())
		got := r.blocksIn(kvblock.TierDevice)
		for at := range m.workers[testWorker].blocks {
			if at.tier == kvblock.TierDevice && !got[at.hash] {
				t.Fatalf("after seq %d: the model has block %d, a router does not", b.seq, at.hash)
			}
		}
		if device, host := len(got), len(r.blocksIn(kvblock.TierHostPinned)); device+host != len(m.workers[testWorker].blocks) {
			t.Fatalf("after seq %d: a router has %d and %d blocks, the model %d", b.seq, device, host, len(m.workers[testWorker].blocks))
		}
		if b.oracle.Labels == "" {
			s.addExact(b, got, r.blocksIn(kvblock.TierHostPinned))
			continue
		}
		want := pool.apply(t, b, blockSize)
		digest := blocksDigest(want)
		if group, ok := b.oracle.SHA256ByGroup["0"]; !strings.HasPrefix(digest, group) || !ok && (len(want) != b.oracle.Len || digest != b.oracle.SHA256) {
			t.Fatalf("the labels do not yield the engine's blocks after seq %d", b.seq)
		}
		if !s.add(want, got) && subject.isExact() {
			t.Fatalf("after seq %d: device memory is exact, and its blocks differ from the engine's: %v", b.seq, s)
		}
	}
	if err := subject.journal.err(); err != nil {
		t.Fatal(err)
	}
	return s
}

// addExact scores a batch for which only the digest of the engine's blocks is known.
func (s *score) addExact(b recordedBatch, device, host map[uint64]bool) {
	same := len(device) == b.oracle.Len && blocksDigest(device) == b.oracle.SHA256
	if b.oracle.HostSHA256 != "" {
		same = same && len(host) == b.oracle.HostLen && blocksDigest(host) == b.oracle.HostSHA256
	}
	if same {
		s.exact++
	}
	s.batches++
}

// recordings are the recordings to play and the blocks that may be missing: copies that
// cannot be distinguished from an announcement. A block that the engine does not have is
// always an error.
var recordings = []struct {
	name                 string
	exact                bool
	missing, missingLast int
	host                 bool // it has a host tier, which consolidation merges with the device tier
}{
	{name: "engines-2026-11/i_incremental", exact: true},
	{name: "engines-2026-11/ii_full", missing: 10, missingLast: 3},
	{name: "engines-2026-11/iii_mixed", missing: 10, missingLast: 3},
	{name: "engines-2026-11/iv_hybrid_mixed", missing: 10, missingLast: 3},
	{name: "engines-2026-11/v_reset_restart_full", missing: 10, missingLast: 3},
	{name: "engines-2026-11/vii_mixed_skip_reading", missing: 10, missingLast: 3},
	{name: "engines-2026-11/x_short_prompts_full", missing: 10, missingLast: 3},
	{name: "engines-2026-11/xiv_mamba_partial_short_first", exact: true},
	{name: "engines-2026-11/sglang_radix_p16", exact: true},
	{name: "engines-2026-11/sglang_unified_names", exact: true},
	{name: "engines-2026-11/sglang_unified_hicache", exact: true},
	{name: "vllm-real/plain_v0", exact: true},
	{name: "vllm-real/plain_v1", exact: true},
	{name: "vllm-real/salts", exact: true},
	{name: "vllm-real/restart_reset_salts_preempt", missing: 10, missingLast: 3},
	{name: "vllm-real/offload_cpu_reset", exact: true, host: true},
	{name: "hybrid/k_oss_mixed", exact: true},
	{name: "hybrid/k_qwen_mixed", exact: true},
	{name: "hybrid/l_cpu_full_report_full", missing: 10, host: true},
	{name: "hybrid/l_cpu_oss", exact: true, host: true},
	{name: "hybrid/l_cpu_qwen", exact: true, host: true},
}

// TestRecordingsBecomeTheEnginesBlocks plays recordings of engines, all with vLLM's copy
// rule, and compares a router's blocks with the engine's after every batch.
func TestRecordingsBecomeTheEnginesBlocks(t *testing.T) {
	testclass.WithoutRace(t)
	for _, r := range recordings {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			batches, blockSize := readRecording(t, r.name)
			s := playRecording(t, batches, blockSize, false)
			t.Log(s)
			if testclass.Full() {
				if configured := playRecording(t, batches, blockSize, true); configured != s {
					t.Errorf("with the block size configured: got %v, want as where it is learned: %v", configured, s)
				}
			}
			if batches[0].oracle.Labels != "" && !r.host { // recordings of SGLang have one, too
				consolidated := playRecording(t, batches, blockSize, false, feed.EngineVLLM, feed.EngineKVBM)
				if consolidated != s {
					t.Errorf("with a second source: got %v, want as without: %v", consolidated, s)
				}
			}
			switch {
			case r.exact && s.exact != s.batches:
				t.Errorf("got %v, want all exact", s)
			case s.extra > 0 || s.missing > r.missing || s.missingAtEnd > r.missingLast:
				t.Errorf("got %v, want none extra, and at most %d missing (%d at the end)", s, r.missing, r.missingLast)
			}
		})
	}
}

// TestGroupsOmittedOfRecordings checks that a recording of a hybrid model has exactly one
// GroupsOmitted, and any other recording none.
func TestGroupsOmittedOfRecordings(t *testing.T) {
	testclass.WithoutRace(t)
	hybrid := map[string]int{"engines-2026-11/iv_hybrid_mixed": 1, "engines-2026-11/xiv_mamba_partial_short_first": 1,
		"hybrid/k_oss_mixed": 1, "hybrid/k_qwen_mixed": 1, "hybrid/l_cpu_oss": 1, "hybrid/l_cpu_qwen": 1}
	for _, r := range recordings {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			batches, blockSize := readRecording(t, r.name)
			for _, sources := range [][]feed.Engine{nil, {feed.EngineVLLM, feed.EngineKVBM}} {
				subject, err := newSubject(pipeline.Config{})
				if err != nil {
					t.Fatal(err)
				}
				p := newRecordingPlayer(subject, wire.BlockSize{Tokens: blockSize, Configured: true}, sources...)
				for _, b := range batches {
					p.play(t, b)
				}
				got := 0
				for _, entry := range subject.journal.all()[testWorker] {
					for _, e := range entry.GetEvents() {
						if e.GetGroupsOmitted() != nil {
							got++
						}
					}
				}
				if want := hybrid[r.name]; got != want {
					t.Errorf("with sources %v: %d GroupsOmitted events, want %d", sources, got, want)
				}
			}
		})
	}
}
