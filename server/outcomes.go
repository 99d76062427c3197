package server

import (
	"context"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/internal/accuracy"
	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/incident"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/internal/callerror"
	"github.com/kvcast/kvcast/server/match"
)

// outcomes has the outcomes that routers have reported, by dp rank. It is safe for concurrent use. See prune for when it forgets ranks
// that were removed.
type outcomes struct {
	index     *index.Index
	incidents *incident.Log
	log       *slog.Logger

	mu      sync.Mutex // guards all below
	ranks   map[dpRank]*rankOutcomes
	most    int    // ranks, until the index is searched for them
	ignored uint64 // outcomes of ranks that are not known
}

// rankOutcomes are the outcomes of a rank.
type rankOutcomes struct {
	accuracy.Rank
	index.Brief           // of the last outcome
	since       time.Time // when it became overpredicted, if it is
}

func newOutcomes(x *index.Index, cfg *Config) *outcomes {
	return &outcomes{index: x, incidents: cfg.Incidents, log: cfg.Logger, ranks: make(map[dpRank]*rankOutcomes)}
}

func (s routerEvents) ReportOutcome(_ context.Context, req *kvcastv1.ReportOutcomeRequest) (*kvcastv1.ReportOutcomeResponse, error) {
	if err := s.checkServing(); err != nil {
		return nil, err
	}
	all := req.GetOutcomes()
	if len(all) == 0 {
		return nil, callerror.InvalidField(s.journal.Bounds(), "outcomes", "0 outcomes are not allowed: want 1 to %d", match.MaxOutcomes)
	}
	if violations := match.CheckOutcomes(all); violations != nil {
		return nil, callerror.InvalidFields(violations, s.journal.Bounds())
	}
	return &kvcastv1.ReportOutcomeResponse{Ignored: uint32(s.outcomes.report(all, s.journal.Bounds()))}, nil
}

// report adds outcomes, and returns how many of them were ignored. b are the journal's bounds.
func (o *outcomes) report(all []*kvcastv1.Outcome, b journal.Bounds) (ignored int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, outcome := range all {
		if !o.add(outcome, b) {
			ignored++
		}
	}
	o.ignored += uint64(ignored)
	return ignored
}

// add adds an outcome. It returns false if the outcome is not of a known rank and position. The caller must hold mu.
func (o *outcomes) add(outcome *kvcastv1.Outcome, b journal.Bounds) bool {
	rank, at := dpRank{outcome.GetWorker(), outcome.GetDpRank()}, outcome.GetPosition()
	brief, ok := o.index.Brief(rank.worker, rank.rank)
	if !ok || at.GetSeq() < brief.Created || at.GetSeq() > b.Newest || checkEpoch(at, b) != nil {
		return false
	}
	r := o.ranks[rank]
	if r == nil || r.Created != brief.Created { // of a worker that was added again
		o.prune()
		r = new(rankOutcomes)
		o.ranks[rank] = r
	}
	r.Brief = brief
	trust := outcome.GetTrust()
	if trust == kvcastv1.Trust_TRUST_UNSPECIFIED || r.Overpredicted {
		trust = brief.Trust // without OVERPREDICTED, so that a rank can recover
	}
	changed := r.Add(accuracy.Outcome{
		Predicted: outcome.GetPredictedTokens(), Reused: outcome.GetCachedTokens(),
		Judged:    trust == kvcastv1.Trust_TRUST_EXACT && brief.Trust == kvcastv1.Trust_TRUST_EXACT,
		Explained: at.GetSeq() < brief.Removed,
	})
	if changed {
		o.changed(rank, r)
	}
	return true
}

// changed remembers that a rank has become overpredicted, or is not any more.
func (o *outcomes) changed(rank dpRank, r *rankOutcomes) {
	i := &kvcastv1.Incident{
		Kind: kvcastv1.IncidentKind_INCIDENT_KIND_OVERPREDICTED, Worker: rank.worker, DpRank: &rank.rank, Detail: r.Detail(r.BlockSize),
	}
	if r.Overpredicted {
		r.since = time.Now()
		o.log.Warn("predictions are too long again and again: the rank is degraded", "worker", rank.worker, "dp_rank", rank.rank, "detail", i.GetDetail())
	} else {
		o.log.Info("predictions are right again", "worker", rank.worker, "dp_rank", rank.rank)
		i.Kind, i.DurationNano = kvcastv1.IncidentKind_INCIDENT_KIND_ACCURATE, uint64(time.Since(r.since))
	}
	o.incidents.Add(i)
}

// prune forgets the ranks that the index does not have any more, if there are twice as many as the last time. The caller must hold mu.
func (o *outcomes) prune() {
	if len(o.ranks) < o.most {
		return
	}
	for rank := range o.ranks {
		if _, ok := o.index.Brief(rank.worker, rank.rank); !ok {
			delete(o.ranks, rank)
		}
	}
	o.most = 2*len(o.ranks) + 16
}

// Overpredicted returns the dp ranks of which predictions are too long again and again, by what routers have reported to this server.
func (s *Server) Overpredicted() []RankSince { return s.outcomes.overpredicted() }

func (o *outcomes) overpredicted() (all []RankSince) {
	o.each(func(rank dpRank, r *rankOutcomes) {
		if r.Overpredicted {
			all = append(all, RankSince{rank.worker, rank.rank, time.Since(r.since)})
		}
	})
	return all
}

// each calls visit with each rank that has outcomes and is in the index.
func (o *outcomes) each(visit func(dpRank, *rankOutcomes)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for rank, r := range o.ranks {
		if brief, ok := o.index.Brief(rank.worker, rank.rank); ok && brief.Created == r.Created {
			visit(rank, r)
		}
	}
}

// accuracy returns how right the predictions of a rank were; nil if nothing was reported.
func (o *outcomes) accuracy(worker string, rank uint32) *kvcastv1.Accuracy {
	o.mu.Lock()
	defer o.mu.Unlock()
	r := o.ranks[dpRank{worker, rank}]
	if r == nil {
		return nil
	}
	if brief, ok := o.index.Brief(worker, rank); !ok || brief.Created != r.Created {
		return nil
	}
	n, tokens := &r.Counts.Outcomes, &r.Counts.Tokens
	return &kvcastv1.Accuracy{
		Exact: n[accuracy.Exact], Over: n[accuracy.Over], Under: n[accuracy.Under],
		ExactTokens: tokens[accuracy.Exact], OverTokens: tokens[accuracy.Over], UnderTokens: tokens[accuracy.Under],
		Detail: r.Detail(r.BlockSize),
	}
}

var (
	outcomeLabels   = []string{"worker", "dp_rank", "outcome"}
	descPredictions = prometheus.NewDesc("kvcast_predictions_total",
		"Predictions of which routers have reported what the engine reused: exact, over (too long) or under (too short).", outcomeLabels, nil)
	descPredictionTokens = prometheus.NewDesc("kvcast_prediction_tokens_total",
		"Tokens of these predictions: predicted and reused (exact), predicted alone (over), or reused alone (under).", outcomeLabels, nil)
	descOverpredicted = prometheus.NewDesc("kvcast_overpredicted",
		"1 for each dp rank that is degraded because predictions of it are too long again and again.", outcomeLabels[:2], nil)
	descIgnored = prometheus.NewDesc("kvcast_predictions_ignored_total",
		"Reports of unknown workers, dp ranks and positions.", nil, nil)
)

func (*outcomes) Describe(ch chan<- *prometheus.Desc) {
	ch <- descPredictions
	ch <- descPredictionTokens
	ch <- descOverpredicted
	ch <- descIgnored
}

// Collect implements prometheus.Collector. It does not hold mu while it sends: the registry that receives also computes metrics that need mu.
func (o *outcomes) Collect(ch chan<- prometheus.Metric) {
	var all []prometheus.Metric
	metric := func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string) {
		all = append(all, prometheus.MustNewConstMetric(d, t, v, labels...))
	}
	o.each(func(rank dpRank, r *rankOutcomes) {
		number := strconv.FormatUint(uint64(rank.rank), 10)
		for kind, name := range accuracy.Kinds {
			metric(descPredictions, prometheus.CounterValue, float64(r.Counts.Outcomes[kind]), rank.worker, number, name)
			metric(descPredictionTokens, prometheus.CounterValue, float64(r.Counts.Tokens[kind]), rank.worker, number, name)
		}
		if r.Overpredicted {
			metric(descOverpredicted, prometheus.GaugeValue, 1, rank.worker, number)
		}
	})
	o.mu.Lock()
	metric(descIgnored, prometheus.CounterValue, float64(o.ignored))
	o.mu.Unlock()
	for _, m := range all {
		ch <- m
	}
}
