package ingest

import (
	"math"
	"testing"

	"pgregory.net/rapid"
)

func TestSequencer(t *testing.T) {
	type step struct {
		seq     uint64
		hash    uint64
		newLife bool
		want    verdict
		missing seqRange
	}
	const top = math.MaxUint64
	tests := []struct {
		name  string
		start uint64
		steps []step
	}{
		{"from the start", 0, []step{
			{seq: 0, want: verdictFirst},
			{seq: 1, want: verdictNext},
			{seq: 2, want: verdictNext},
		}},
		{"first contact in the middle", 0, []step{
			{seq: 7, want: verdictFirst, missing: seqRange{0, 6, 7}},
			{seq: 8, want: verdictNext},
		}},
		{"an engine that starts at 1", 1, []step{
			{seq: 1, want: verdictFirst},
			{seq: 2, want: verdictNext},
			{seq: 1, hash: 9, want: verdictRestart},
		}},
		{"an engine that starts at 1, from 3", 1, []step{
			{seq: 3, want: verdictFirst, missing: seqRange{1, 2, 2}},
		}},
		{"an engine said to start at 1 starts at 0", 1, []step{
			{seq: 0, want: verdictFirst},
			{seq: 1, want: verdictNext},
			{seq: 0, hash: 9, want: verdictRestart},
		}},
		{"gaps of one and more", 0, []step{
			{seq: 0, want: verdictFirst},
			{seq: 2, want: verdictGap, missing: seqRange{1, 1, 1}},
			{seq: 6, want: verdictGap, missing: seqRange{3, 5, 3}},
			{seq: 7, want: verdictNext},
		}},
		{"duplicates of the last and of an earlier one", 0, []step{
			{seq: 0, hash: 1, want: verdictFirst},
			{seq: 1, hash: 2, want: verdictNext},
			{seq: 1, hash: 2, want: verdictDuplicate},
			{seq: 0, hash: 1, want: verdictDuplicate},
			{seq: 2, hash: 3, want: verdictNext},
		}},
		{"another batch of the last seq", 0, []step{
			{seq: 0, hash: 1, want: verdictFirst},
			{seq: 1, hash: 2, want: verdictNext},
			{seq: 1, hash: 3, want: verdictRestart, missing: seqRange{0, 0, 1}},
			{seq: 2, hash: 4, want: verdictNext},
		}},
		{"a batch that came in the gap after all", 0, []step{
			{seq: 0, want: verdictFirst},
			{seq: 2, want: verdictGap, missing: seqRange{1, 1, 1}},
			{seq: 1, want: verdictRestart, missing: seqRange{0, 0, 1}},
		}},
		{"restart forgets the life before", 0, []step{
			{seq: 0, hash: 1, want: verdictFirst},
			{seq: 1, hash: 2, want: verdictNext},
			{seq: 0, hash: 3, want: verdictRestart},
			{seq: 0, hash: 1, want: verdictRestart},
		}},
		{"new life at a seq that would go on", 0, []step{
			{seq: 0, want: verdictFirst},
			{seq: 1, newLife: true, want: verdictRestart, missing: seqRange{0, 0, 1}},
			{seq: 0, newLife: true, want: verdictRestart},
		}},
		{"new life at first contact", 0, []step{
			{seq: 0, newLife: true, want: verdictFirst},
		}},
		{"the largest seq has none after it", 0, []step{
			{seq: top - 1, want: verdictFirst, missing: seqRange{0, top - 2, top - 1}},
			{seq: top, want: verdictNext},
			{seq: 0, want: verdictRestart},
			{seq: top, want: verdictGap, missing: seqRange{1, top - 1, top - 1}},
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := sequencer{start: tt.start}
			for i, st := range tt.steps {
				got, missing := s.admit(st.seq, fingerprint{hash: st.hash}, st.newLife)
				if got != st.want || missing != st.missing {
					t.Fatalf("step %d: admit(%d) = %d, %v; want %d, %v", i, st.seq, got, missing, st.want, st.missing)
				}
			}
		})
	}
}

func TestSeqRangesCountUpToTheLargestNumber(t *testing.T) {
	const top = math.MaxUint64
	if got, want := rangeBetween(0, top).through(top), (seqRange{0, top, top}); got != want {
		t.Errorf("all seqs: %v, want %v", got, want)
	}
	if got, want := rangeBetween(1, top).through(top), (seqRange{1, top, top}); got != want {
		t.Errorf("all seqs from 1: %v, want %v", got, want)
	}
	if got, want := (seqRange{}).through(top), (seqRange{top, top, 1}); got != want {
		t.Errorf("the last seq: %v, want %v", got, want)
	}
}

func TestSequencerRemembersTheLastBatches(t *testing.T) {
	var s sequencer
	for seq := range uint64(rememberedBatches + 1) {
		s.admit(seq, fingerprint{hash: seq}, false)
	}
	if v, _ := s.admit(1, fingerprint{hash: 1}, false); v != verdictDuplicate {
		t.Errorf("the oldest batch remembered: verdict %d, want duplicate", v)
	}
	if v, _ := s.admit(1, fingerprint{hash: 1, time: 1}, false); v != verdictRestart {
		t.Errorf("another time: verdict %d, want restart", v)
	}
	s = sequencer{}
	for seq := range uint64(rememberedBatches + 1) {
		s.admit(seq, fingerprint{hash: seq}, false)
	}
	if v, _ := s.admit(0, fingerprint{}, false); v != verdictRestart {
		t.Errorf("a batch forgotten: verdict %d, want restart", v)
	}
}

// admit judges a batch and takes it, as a publisher without a replay socket does.
func (s *sequencer) admit(seq uint64, fp fingerprint, newLife bool) (verdict, seqRange) {
	v, missing := s.judge(seq, fp, newLife)
	if v == verdictDuplicate {
		return v, missing
	}
	if v == verdictRestart {
		s.forget()
	}
	s.take(seq, fp)
	return v, missing
}

func TestSequencerOfAnEngineThatHasSaidNothing(t *testing.T) {
	for _, tt := range []struct {
		name    string
		seq     uint64
		want    verdict
		missing seqRange
	}{
		{"its first batch", 1, verdictNext, seqRange{}},
		{"one below its first seq", 0, verdictNext, seqRange{}},
		{"a later one", 4, verdictGap, seqRange{1, 3, 3}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := sequencer{start: 1}
			if _, ok := s.due(); ok {
				t.Error("a seq is due before anything is known")
			}
			s.open()
			if due, ok := s.due(); due != 1 || !ok {
				t.Errorf("due is %d, %v; want 1", due, ok)
			}
			if v, missing := s.judge(tt.seq, fingerprint{}, true); v != tt.want || missing != tt.missing {
				t.Errorf("judge(%d) = %d, %v; want %d, %v", tt.seq, v, missing, tt.want, tt.missing)
			}
		})
	}
}

// history is the sequencer without bounds, as plainly as it can be said.
type history struct {
	start   uint64
	batches []remembered // of this life
}

func (h *history) admit(seq uint64, fp fingerprint, newLife bool) (v verdict, missing []uint64) {
	span := func(from, to uint64) (seqs []uint64) {
		for ; from < to; from++ {
			seqs = append(seqs, from)
		}
		return seqs
	}
	n := len(h.batches)
	if n == 0 {
		v, missing = verdictFirst, span(h.start, seq)
	} else if last := h.batches[n-1].seq; !newLife && seq > last {
		v, missing = verdictNext, span(last+1, seq)
		if len(missing) > 0 {
			v = verdictGap
		}
	} else {
		for _, b := range h.batches[max(0, n-rememberedBatches):] {
			if !newLife && b.seq == seq && b.fingerprint == fp {
				return verdictDuplicate, nil
			}
		}
		v, missing = verdictRestart, span(h.start, seq)
		h.batches = nil
	}
	h.batches = append(h.batches, remembered{seq, fp})
	return v, missing
}

func TestSequencerAsThePlainHistory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		start := rapid.Uint64Range(0, 1).Draw(t, "start")
		s := sequencer{start: start}
		h := history{start: start}
		seq := rapid.Uint64Range(0, 5).Draw(t, "first")
		admit := func(seq, hash uint64, newLife bool) {
			fp := fingerprint{hash: hash}
			got, missing := s.admit(seq, fp, newLife)
			want, wantMissing := h.admit(seq, fp, newLife)
			same := missing.count == uint64(len(wantMissing))
			if same && missing.count > 0 {
				same = missing.first == wantMissing[0] && missing.last == wantMissing[len(wantMissing)-1]
			}
			if got != want || !same {
				t.Fatalf("admit(%d) = %d, %v; want %d, %v", seq, got, missing, want, wantMissing)
			}
			if n := len(s.past.ring); n > rememberedBatches {
				t.Fatalf("%d batches remembered", n)
			}
		}
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			switch rapid.IntRange(0, 4).Draw(t, "step") {
			case 0: // onwards, long enough to fill the ring
				for range rapid.IntRange(1, 700).Draw(t, "run") {
					admit(seq, seq%3, false)
					seq++
				}
			case 1: // a gap
				seq += rapid.Uint64Range(1, 2000).Draw(t, "gap")
				admit(seq, seq%3, false)
				seq++
			case 2: // back, to the very batch or to another
				seq -= min(seq, rapid.Uint64Range(1, 1500).Draw(t, "back"))
				admit(seq, seq%3+rapid.Uint64Range(0, 1).Draw(t, "other"), false)
				seq = s.last + 1
			case 3: // a new life from the start
				seq = rapid.Uint64Range(0, 2).Draw(t, "new")
				admit(seq, 7, false)
				seq = s.last + 1
			case 4: // a new life that says so
				admit(seq, 8, true)
				seq++
			}
		}
	})
}
