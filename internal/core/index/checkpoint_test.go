package index_test

import (
	"bytes"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// TestCheckpointsAndLaterEntriesEqualTheState restores each worker from a checkpoint of another seq, or from none, and
// applies the later entries in their encoded form.
func TestCheckpointsAndLaterEntriesEqualTheState(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var entries []*kvcastv1.Entry
		for seq := range uint64(rapid.IntRange(0, 60).Draw(t, "entries")) {
			entries = append(entries, drawEntry(t, seq+1, false))
		}
		x := index.New()
		encoded, seqs := make(map[string][]byte), make(map[string]uint64)
		for i, e := range entries {
			x.ApplyEntry(e)
			for _, name := range []string{"a", "b", "c"} {
				if !rapid.Bool().Draw(t, "checkpoint") {
					continue
				}
				state, seq, ok := x.Checkpoint(t.Context(), name)
				if !ok {
					delete(encoded, name)
					seqs[name] = uint64(i + 1)
					continue
				}
				b, err := proto.Marshal(state)
				if err != nil || seq != uint64(i+1) {
					t.Fatalf("checkpoint after entry %d: got seq %d, error %v", i+1, seq, err)
				}
				encoded[name], seqs[name] = b, seq
			}
		}
		restored := index.New()
		for name, b := range encoded {
			var state statev1.IndexWorker
			if err := proto.Unmarshal(b, &state); err != nil {
				t.Fatal(err)
			}
			if err := restored.Restore(&state); err != nil {
				t.Fatalf("restore %s: %v", name, err)
			}
		}
		for _, e := range entries {
			seq := e.GetSeq()
			if seq <= seqs[e.GetWorker()] {
				restored.Advance(seq)
				continue
			}
			body := proto.CloneOf(e)
			body.Seq = 0
			b, err := proto.Marshal(body)
			if err != nil {
				t.Fatal(err)
			}
			if err := restored.ApplyBody(seq, b); err != nil {
				t.Fatal(err)
			}
		}
		if diff := compare(x, restored); diff != "" {
			t.Fatal(diff)
		}
	})
}

func TestDamagedCheckpointsAreErrors(t *testing.T) {
	t.Parallel()
	state, _, ok := filled(1000).Checkpoint(t.Context(), "w")
	if !ok || len(state.GetBlocks()) == 0 {
		t.Fatal("there is no checkpoint")
	}
	for name, damage := range map[string]func(*statev1.IndexWorker){
		"cut off":           func(s *statev1.IndexWorker) { s.Blocks[0] = s.Blocks[0][:len(s.Blocks[0])-1] },
		"of another worker": func(s *statev1.IndexWorker) { s.Blocks[0] = bytes.Replace(s.Blocks[0], []byte("w"), []byte("v"), 1) },
		"without a worker":  func(s *statev1.IndexWorker) { s.Blocks[0] = s.Blocks[0][3:] },
		"not an event":      func(s *statev1.IndexWorker) { s.Blocks[0] = []byte{1 << 3, 5} },
	} {
		damaged := proto.CloneOf(state)
		damage(damaged)
		if err := index.New().Restore(damaged); err == nil {
			t.Errorf("blocks %s: got no error", name)
		}
	}
}

// BenchmarkRestore restores a worker of 1,000,000 blocks.
func BenchmarkRestore(b *testing.B) {
	const blocks = 1_000_000
	state, _, _ := filled(blocks).Checkpoint(b.Context(), "w")
	for b.Loop() {
		if err := index.New().Restore(state); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(b.Elapsed().Seconds()*1e9/float64(b.N)/blocks, "ns/block")
	b.ReportMetric(float64(proto.Size(state))/blocks, "B/block")
}
