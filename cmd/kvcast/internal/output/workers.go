package output

import (
	"cmp"
	"fmt"
	"slices"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// WorkerName returns the name of a worker, and says if it is a pool.
func WorkerName(w *kvcastv1.WorkerStatus) string {
	if w.GetPool() {
		return Printable(w.GetName()) + " (pool)"
	}
	return Printable(w.GetName())
}

// Ranks returns the dp ranks of a worker in order, including ranks that have a source but no blocks.
func Ranks(w *kvcastv1.WorkerStatus) []*kvcastv1.RankStatus {
	ranks := slices.Clone(w.GetRanks())
	for _, s := range w.GetSources() {
		if !slices.ContainsFunc(ranks, func(r *kvcastv1.RankStatus) bool { return r.GetDpRank() == s.GetDpRank() }) {
			ranks = append(ranks, &kvcastv1.RankStatus{DpRank: s.GetDpRank()})
		}
	}
	slices.SortFunc(ranks, func(a, b *kvcastv1.RankStatus) int { return cmp.Compare(a.GetDpRank(), b.GetDpRank()) })
	return ranks
}

// RankSources returns the sources of a dp rank.
func RankSources(w *kvcastv1.WorkerStatus, rank uint32) (all []*kvcastv1.SourceStatus) {
	for _, s := range w.GetSources() {
		if s.GetDpRank() == rank {
			all = append(all, s)
		}
	}
	return all
}

// Gaps returns the number of gaps and missed batches of a dp rank, and whether the rank is incomplete.
func Gaps(r *kvcastv1.RankStatus) string {
	text := fmt.Sprint(r.GetGaps())
	if r.GetGaps() > 0 {
		text += fmt.Sprintf(" (%d batches)", r.GetMissedBatches())
	}
	if r.GetIncomplete() {
		text += " INCOMPLETE"
	}
	return text
}

// HasAccuracy reports whether routers have reported outcomes of some rank.
func HasAccuracy(workers []*kvcastv1.WorkerStatus) bool {
	return slices.ContainsFunc(workers, func(w *kvcastv1.WorkerStatus) bool {
		return slices.ContainsFunc(w.GetRanks(), func(r *kvcastv1.RankStatus) bool { return r.GetAccuracy() != nil })
	})
}

// Accuracy returns how many predictions of a rank were exact, such as 99.1% of 421.
func Accuracy(r *kvcastv1.RankStatus) string {
	a := r.GetAccuracy()
	all := a.GetExact() + a.GetOver() + a.GetUnder()
	if all == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f%% of %d", 100*float64(a.GetExact())/float64(all), all)
}
