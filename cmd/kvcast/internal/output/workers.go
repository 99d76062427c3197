package output

import (
	"cmp"
	"fmt"
	"slices"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Ranks returns the dp ranks of a worker in order, including those that have a source and no blocks yet.
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

// Gaps returns how many gaps a dp rank had, with the batches they missed and whether its blocks may be wrong.
func Gaps(r *kvcastv1.RankStatus) string {
	text := Decimal(r.GetGaps())
	if r.GetGaps() > 0 {
		text += fmt.Sprintf(" (%d batches)", r.GetMissedBatches())
	}
	if r.GetIncomplete() {
		text += " INCOMPLETE"
	}
	return text
}
