// Package accuracy judges predictions by what engines have reused.
//
// In: the outcomes of a dp rank's predictions, in the order of their reports. Out: how many were right, and whether the rank is
// overpredicted: its predictions are too long again and again. Guarantee: pure, and some 100 bytes a rank.
package accuracy

import (
	"fmt"
	"math/bits"
)

// The rules of Rank.Overpredicted, over the last Window outcomes that are judged.
const (
	// Window is the number of outcomes that are remembered.
	Window = 64
	// MaxUnexplained is the number of outcomes that are too long without an explanation at which a rank becomes overpredicted.
	MaxUnexplained = 8
	// MaxOver is the same for outcomes that are too long, explained or not.
	MaxOver = 32
	// MaxOverAgain is the number of outcomes that are too long, all of them explained, up to which a rank is no longer overpredicted.
	MaxOverAgain = 8
)

// Outcome is a prediction and what the engine has reused, in tokens.
type Outcome struct {
	Predicted, Reused uint64
	// Judged reports whether the prediction was EXACT, so that the outcome says something about the rank. Others are counted.
	Judged bool
	// Explained reports whether blocks of the rank were removed after the prediction, so that the prediction may have been right.
	Explained bool
}

// Kind says whether a prediction was right.
type Kind int

// The kinds.
const (
	Exact Kind = iota
	Over       // too long
	Under      // too short
)

// Kinds are the names of the kinds.
var Kinds = [...]string{Exact: "exact", Over: "over", Under: "under"}

// Counts are the numbers of predictions by Kind, and of tokens: predicted and reused, predicted alone, and reused alone.
type Counts struct {
	Outcomes, Tokens [len(Kinds)]uint64
}

// Rank has the outcomes of a dp rank. The zero value is of one without outcomes.
type Rank struct {
	Counts Counts
	// Overpredicted reports whether predictions of the rank must not be called EXACT.
	Overpredicted bool

	// Bit n is about the outcome n before the last one that was judged: whether it was too long, and that without an explanation.
	over, unexplained uint64
	// excess is the number of tokens by which the last outcome without an explanation was too long, and equal how many before and with
	// it in a row had the same number.
	excess uint64
	equal  int
}

// Add adds an outcome, and reports whether Overpredicted has changed.
func (r *Rank) Add(o Outcome) (changed bool) {
	kind, both := Exact, min(o.Predicted, o.Reused)
	switch {
	case o.Predicted > o.Reused:
		kind = Over
	case o.Predicted < o.Reused:
		kind = Under
	}
	r.Counts.Outcomes[kind]++
	r.Counts.Tokens[Exact] += both
	r.Counts.Tokens[Over] += o.Predicted - both
	r.Counts.Tokens[Under] += o.Reused - both
	if !o.Judged {
		return false
	}
	r.over, r.unexplained = r.over<<1, r.unexplained<<1
	if kind == Over {
		r.over |= 1
		if !o.Explained {
			r.unexplained |= 1
			r.count(o.Predicted - o.Reused)
		}
	}
	return r.judge()
}

// count counts outcomes in a row that are too long by the same number of tokens.
func (r *Rank) count(excess uint64) {
	if excess != r.excess {
		r.excess, r.equal = excess, 0
	}
	r.equal++
}

// judge sets Overpredicted, and reports whether it has changed.
func (r *Rank) judge() (changed bool) {
	over, unexplained := bits.OnesCount64(r.over), bits.OnesCount64(r.unexplained)
	switch {
	case !r.Overpredicted && (unexplained >= MaxUnexplained || over >= MaxOver):
		r.Overpredicted = true
	case r.Overpredicted && unexplained == 0 && over <= MaxOverAgain:
		r.Overpredicted = false
	default:
		return false
	}
	return true
}

// Detail says by how much the predictions of an overpredicted rank are too long, for people. blockSize is the number of tokens in a
// block; 0: unknown.
func (r *Rank) Detail(blockSize uint32) string {
	if !r.Overpredicted {
		return ""
	}
	if r.equal < MaxUnexplained {
		return fmt.Sprintf("%d of the last %d outcomes were too long", bits.OnesCount64(r.over), Window)
	}
	detail := fmt.Sprintf("the last %d outcomes without a removal were all too long by %d tokens", r.equal, r.excess)
	if r.excess == uint64(blockSize) {
		detail += ", one block: does the engine drop the last block of each prefix, as with EAGLE and a KV connector?"
	}
	return detail
}
