package sequence

import (
	"math"
	"testing"

	"pgregory.net/rapid"
)

func TestOrder(t *testing.T) {
	type step struct {
		seq       uint64
		hash      uint64
		restarted bool
		want      verdict
		missing   seqRange
	}
	const top = math.MaxUint64
	tests := []struct {
		name  string
		start uint64
		steps []step
	}{
		{"contiguous from the first", 0, []step{
			{seq: 0, want: verdictFirst},
			{seq: 1, want: verdictNext},
			{seq: 2, want: verdictNext},
		}},
		{"first contact later", 0, []step{
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
		{"an engine configured to start at 1 starts at 0", 1, []step{
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
		{"another batch with the last seq", 0, []step{
			{seq: 0, hash: 1, want: verdictFirst},
			{seq: 1, hash: 2, want: verdictNext},
			{seq: 1, hash: 3, want: verdictRestart, missing: seqRange{0, 0, 1}},
			{seq: 2, hash: 4, want: verdictNext},
		}},
		{"a late batch of a gap", 0, []step{
			{seq: 0, want: verdictFirst},
			{seq: 2, want: verdictGap, missing: seqRange{1, 1, 1}},
			{seq: 1, want: verdictRestart, missing: seqRange{0, 0, 1}},
		}},
		{"restart forgets the former incarnation", 0, []step{
			{seq: 0, hash: 1, want: verdictFirst},
			{seq: 1, hash: 2, want: verdictNext},
			{seq: 0, hash: 3, want: verdictRestart},
			{seq: 0, hash: 1, want: verdictRestart},
		}},
		{"new incarnation at the next seq", 0, []step{
			{seq: 0, want: verdictFirst},
			{seq: 1, restarted: true, want: verdictRestart, missing: seqRange{0, 0, 1}},
			{seq: 0, restarted: true, want: verdictRestart},
		}},
		{"new incarnation at first contact", 0, []step{
			{seq: 0, restarted: true, want: verdictFirst},
		}},
		{"no seq follows the largest", 0, []step{
			{seq: top - 1, want: verdictFirst, missing: seqRange{0, top - 2, top - 1}},
			{seq: top, want: verdictNext},
			{seq: 0, want: verdictRestart},
			{seq: top, want: verdictGap, missing: seqRange{1, top - 1, top - 1}},
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := order{first: tt.start}
			for i, st := range tt.steps {
				got, missing := s.admit(st.seq, Fingerprint{Hash: st.hash}, st.restarted)
				if got != st.want || missing != st.missing {
					t.Fatalf("step %d: admit(%d) = %d, %v; want %d, %v", i, st.seq, got, missing, st.want, st.missing)
				}
			}
		})
	}
}

func TestSeqRangeCountSaturates(t *testing.T) {
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

func TestHistoryKeepsTheLastBatches(t *testing.T) {
	var s order
	for seq := range uint64(historySize + 1) {
		s.admit(seq, Fingerprint{Hash: seq}, false)
	}
	if v, _ := s.admit(1, Fingerprint{Hash: 1}, false); v != verdictDuplicate {
		t.Errorf("the oldest batch in the history: verdict %d, want duplicate", v)
	}
	if v, _ := s.admit(1, Fingerprint{Hash: 1, Time: 1}, false); v != verdictRestart {
		t.Errorf("another time: verdict %d, want restart", v)
	}
	s = order{}
	for seq := range uint64(historySize + 1) {
		s.admit(seq, Fingerprint{Hash: seq}, false)
	}
	if v, _ := s.admit(0, Fingerprint{}, false); v != verdictRestart {
		t.Errorf("a batch evicted from the history: verdict %d, want restart", v)
	}
}

// admit classifies a batch and advances to it, as for a publisher without a replay socket.
func (s *order) admit(seq uint64, fp Fingerprint, restarted bool) (verdict, seqRange) {
	v, missing := s.classify(seq, fp, restarted)
	if v == verdictDuplicate {
		return v, missing
	}
	if v == verdictRestart {
		s.reset()
	}
	s.advance(seq, fp)
	return v, missing
}

func TestOrderOfAnEngineThatHasPublishedNothing(t *testing.T) {
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
			s := order{first: 1}
			if _, ok := s.next(); ok {
				t.Error("a seq is next before anything is known")
			}
			s.progress = progressEmpty
			if next, ok := s.next(); next != 1 || !ok {
				t.Errorf("next is %d, %v; want 1", next, ok)
			}
			if v, missing := s.classify(tt.seq, Fingerprint{}, true); v != tt.want || missing != tt.missing {
				t.Errorf("classify(%d) = %d, %v; want %d, %v", tt.seq, v, missing, tt.want, tt.missing)
			}
		})
	}
}

// plainHistory is a reference implementation of order, without a limit on its history.
type plainHistory struct {
	start   uint64
	batches []pastBatch // of this incarnation
}

func (h *plainHistory) admit(seq uint64, fp Fingerprint, restarted bool) (v verdict, missing []uint64) {
	span := func(from, to uint64) (seqs []uint64) {
		for ; from < to; from++ {
			seqs = append(seqs, from)
		}
		return seqs
	}
	n := len(h.batches)
	if n == 0 {
		v, missing = verdictFirst, span(h.start, seq)
	} else if last := h.batches[n-1].seq; !restarted && seq > last {
		v, missing = verdictNext, span(last+1, seq)
		if len(missing) > 0 {
			v = verdictGap
		}
	} else {
		for _, b := range h.batches[max(0, n-historySize):] {
			if !restarted && b.seq == seq && b.Fingerprint == fp {
				return verdictDuplicate, nil
			}
		}
		v, missing = verdictRestart, span(h.start, seq)
		h.batches = nil
	}
	h.batches = append(h.batches, pastBatch{seq, fp})
	return v, missing
}

func TestOrderEqualsPlainHistory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		start := rapid.Uint64Range(0, 1).Draw(t, "start")
		s := order{first: start}
		h := plainHistory{start: start}
		seq := rapid.Uint64Range(0, 5).Draw(t, "first")
		admit := func(seq, hash uint64, restarted bool) {
			fp := Fingerprint{Hash: hash}
			got, missing := s.admit(seq, fp, restarted)
			want, wantMissing := h.admit(seq, fp, restarted)
			same := missing.count == uint64(len(wantMissing))
			if same && missing.count > 0 {
				same = missing.first == wantMissing[0] && missing.last == wantMissing[len(wantMissing)-1]
			}
			if got != want || !same {
				t.Fatalf("admit(%d) = %d, %v; want %d, %v", seq, got, missing, want, wantMissing)
			}
			if n := len(s.history.ring); n > historySize {
				t.Fatalf("%d batches in the history", n)
			}
		}
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			switch rapid.IntRange(0, 4).Draw(t, "step") {
			case 0: // contiguous, long enough to fill the ring
				for range rapid.IntRange(1, 700).Draw(t, "run") {
					admit(seq, seq%3, false)
					seq++
				}
			case 1: // a gap
				seq += rapid.Uint64Range(1, 2000).Draw(t, "gap")
				admit(seq, seq%3, false)
				seq++
			case 2: // back, to the same batch or to another
				seq -= min(seq, rapid.Uint64Range(1, 1500).Draw(t, "back"))
				admit(seq, seq%3+rapid.Uint64Range(0, 1).Draw(t, "other"), false)
				seq = s.last + 1
			case 3: // a restart
				seq = rapid.Uint64Range(0, 2).Draw(t, "new")
				admit(seq, 7, false)
				seq = s.last + 1
			case 4: // a restart that the batch names
				admit(seq, 8, true)
				seq++
			}
		}
	})
}
