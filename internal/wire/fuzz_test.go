package wire_test

import (
	"bufio"
	"compress/gzip"
	"encoding/hex"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
)

// readCaptures returns payloads recorded from engines, by file.
func readCaptures(tb testing.TB) map[string][][]byte {
	tb.Helper()
	files, err := filepath.Glob(filepath.Join("testdata", "captures", "*.jsonl.gz"))
	if err != nil || len(files) == 0 {
		tb.Fatalf("%d captures, error %v", len(files), err)
	}
	captures := make(map[string][][]byte)
	for _, file := range files {
		captures[filepath.Base(file)] = readCapture(tb, file)
	}
	return captures
}

func readCapture(tb testing.TB, file string) (payloads [][]byte) {
	tb.Helper()
	f, err := os.Open(file)
	if err != nil {
		tb.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	z, err := gzip.NewReader(f)
	if err != nil {
		tb.Fatal(err)
	}
	lines := bufio.NewScanner(z)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		var message struct{ Frames []string }
		if err := json.Unmarshal(lines.Bytes(), &message); err != nil {
			tb.Fatal(err)
		}
		payload, err := hex.DecodeString(message.Frames[len(message.Frames)-1])
		if err != nil {
			tb.Fatal(err)
		}
		payloads = append(payloads, payload)
	}
	if err := lines.Err(); err != nil {
		tb.Fatal(err)
	}
	return payloads
}

// TestCaptures checks that recorded traffic decodes without skipped events.
func TestCaptures(t *testing.T) {
	testclass.WithoutRace(t)
	for name, payloads := range readCaptures(t) {
		t.Run(name, func(t *testing.T) {
			var d wire.Decoder
			for k, p := range payloads {
				b, err := d.Decode(p)
				if err != nil || len(b.Skipped) != 0 || len(b.Events) == 0 {
					t.Fatalf("message %d: error %v, batch %s", k, err, b.AppendJSON(nil))
				}
				reencode(t, b)
			}
		})
	}
}

// reencode checks that a batch survives encoding and decoding. Only two decoded values have
// no equivalent encoding: a time above 1e11 even after division by 1000, and opaque EAGLE
// tokens.
func reencode(t *testing.T, b *wire.Batch) {
	t.Helper()
	encodable := b.Time <= 1e11
	for _, ev := range b.Events {
		encodable = encodable && (ev.Rare == nil || ev.Rare.Time <= 1e11) && (!ev.Eagle || !ev.OpaqueTokens)
	}
	e := wire.Encoder{BatchForm: b.Form, EventForm: wire.FormMap}
	if !encodable {
		return
	}
	var d wire.Decoder
	got, err := d.Decode(e.AppendBatch(nil, b))
	if err != nil {
		t.Fatalf("decode again: %v", err)
	}
	ignore := cmp.FilterPath(func(p cmp.Path) bool {
		// Skipped events are not encoded, so that the indexes of later events change.
		return p.Last().String() == ".Skipped" || p.Last().String() == ".Index" || p.Last().String() == ".UnknownTag" ||
			p.Last().String() == ".Inputs" // a map always can have them
	}, cmp.Ignore())
	if diff := cmp.Diff(b, got, ignore, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("batch differs after encoding (-want +got):\n%s", diff)
	}
}

// FuzzDecode checks that nothing panics, that a decoded batch survives encoding and
// decoding, and Admit's guarantees.
func FuzzDecode(f *testing.F) {
	for _, v := range readVectors(f) {
		if len(v.payload) < 10_000 {
			f.Add(v.payload)
		}
	}
	for _, payloads := range readCaptures(f) {
		for _, p := range payloads {
			f.Add(p)
		}
	}
	for _, batch := range []any{
		[]any{1.5, []any{}, 0, publisherID},
		obj{"ts": 1.5, "events": []any{stored(obj{"origin": "NEW", "lookahead_token_ids": []any{1}}, 5)}, "publisher_id": publisherID},
		batchOf(stored(obj{"origin": "REUSED"}, 5), stored(obj{"origin": 1}, 6)),
		batchOf(removed(obj{"remaining_copy_counts": []any{0, 3}}, 5, 6), removed(obj{"remaining_copy_counts": []any{-1}}, 5)),
		batchOf([]any{"BlockStored", []any{5}, nil, []any{1}, 1, nil, nil, nil, nil, nil, nil, nil, obj{}, uint64(math.MaxUint64)}),
		batchOf([]any{"BlockStored", []any{5}, nil, []any{1}, 1, nil, nil, obj{"cache_salt": "s"}, "x", obj{}}),
		batchOf(sized(1, nil, 5), sized(4, obj{"medium": "CPU"}, 6)), // a chunk
	} {
		f.Add(pack(f, batch))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		var d wire.Decoder
		b, err := d.Decode(payload)
		if err != nil {
			var e wire.Error
			if !errors.As(err, &e) || e.Name() == "unknown" || b != nil {
				t.Fatalf("batch %v, error %v", b, err)
			}
			return
		}
		if !json.Valid(b.AppendJSON(nil)) {
			t.Fatalf("no JSON: %s", b.AppendJSON(nil))
		}
		reencode(t, b)
		checkAdmit(t, b)
	})
}

func isClear(ev wire.Event) bool { return ev.Kind == wire.KindCleared }

func checkAdmit(t *testing.T, b *wire.Batch) {
	t.Helper()
	var (
		size   wire.BlockSize
		counts wire.Counts
		total  uint64
	)
	events := len(b.Events) + len(b.Skipped)
	wire.NewRules(&size).Admit(b, 0, &counts)
	unknown := counts[wire.ReasonUnknownContent] // their blocks are held
	counts[wire.ReasonUnknownContent] = 0
	if unknown > 0 && b.Doubts == (wire.Doubts{}) && !slices.ContainsFunc(b.Events, isClear) {
		t.Errorf("doubts %v of counts %v", b.Doubts, counts)
	}
	for _, n := range counts {
		total += n
	}
	perhaps := counts[wire.ReasonTokensShort] + counts[wire.ReasonChunks] // counted, and perhaps admitted
	total -= perhaps
	if most := uint64(events); uint64(len(b.Events))+total > most || uint64(len(b.Events))+total+perhaps < most {
		t.Errorf("%d events: %d admitted, counts %v", events, len(b.Events), counts)
	}
	last := uint64(0)
	index := -1
	for _, ev := range b.Events {
		if ev.RawID <= last || ev.Index <= index {
			t.Errorf("raw id %d after %d, index %d after %d", ev.RawID, last, ev.Index, index)
		}
		last, index = ev.RawID, ev.Index
		if len(ev.TokensHashes) > len(ev.BlockHashes) {
			t.Errorf("%d tokens hashes for %d blocks", len(ev.TokensHashes), len(ev.BlockHashes))
		}
		if ev.Tier == 0 && ev.Kind != wire.KindCleared || int(ev.Tier) >= kvblock.TierEnd {
			t.Errorf("kind %d in tier %d", ev.Kind, ev.Tier)
		}
		if len(ev.Tokens) == 0 {
			continue
		}
		want := len(ev.BlockHashes) * int(ev.BlockSize)
		if ev.Eagle && want > 0 {
			want++
		}
		if len(ev.Tokens) != want {
			t.Errorf("%d tokens for %d blocks of %d", len(ev.Tokens), len(ev.BlockHashes), ev.BlockSize)
		}
	}
}
