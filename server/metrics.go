package server

import (
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/match"
)

// metrics are the counters over all calls.
type metrics struct {
	responses prometheus.Counter
	entries   prometheus.Counter
	bytes     prometheus.Counter
	progress  prometheus.Counter
	panics    prometheus.Counter
	stalled   prometheus.Counter
	unread    prometheus.Counter
	late      prometheus.Counter
	evicted   prometheus.Counter
	delay     prometheus.Histogram

	matchedPrompts prometheus.Counter
	matches        prometheus.Counter
	matchSeconds   prometheus.Histogram
	byModel        *modelMetrics

	routed, routedIgnored prometheus.Counter
}

// newMetrics registers the server's metrics, except for those of its limiters and quotas.
func (s *Server) newMetrics(all promauto.Factory) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return all.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	gauge := func(name, help string, value func() float64) {
		all.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value)
	}
	gauge("receiving_requests", "Calls whose request is being received.", func() float64 { return float64(s.receiving.Len()) })
	gauge("subscribers", "Open Subscribe streams.", func() float64 { return float64(s.quotas.subscribers.Total().Used()) })
	gauge("subscriber_lag_entries", "Entries that the subscriber furthest behind has not read yet; one that receives a snapshot is not counted.",
		func() float64 { return float64(s.subscribers.lag(s.journal)) })
	gauge("ready", "1 while /readyz answers ok, and 0 otherwise.", func() float64 {
		if s.Unready() == "" {
			return 1
		}
		return 0
	})
	gauge("knowledge_age_seconds", "Age of the knowledge of the dp rank that was up to date with its engine longest ago.",
		func() float64 { return s.standing.oldest(time.Now(), s.index).Seconds() })
	gauge("snapshots", "Snapshots being sent.", func() float64 { return float64(s.snapshots.sending.Load()) })
	gauge("snapshots_waiting", "Snapshots waiting for a slot.", func() float64 { return float64(s.snapshots.waiting.Load()) })
	gauge("journal_bytes", "Bytes of the retained entries.", func() float64 { return float64(s.journal.Bytes()) })
	gauge("journal_evicted_bytes", "Bytes of evicted entries still in memory, mostly because slow subscribers reference them.",
		func() float64 { return float64(s.journal.EvictedBytes()) })
	gauge("journal_oldest_seq", "Seq of the oldest retained entry.", func() float64 { return float64(s.journal.Bounds().Oldest) })
	gauge("journal_newest_seq", "Seq of the newest entry.", func() float64 { return float64(s.journal.Bounds().Newest) })
	return &metrics{
		responses: counter("responses_sent_total", "Responses with entries sent to subscribers."),
		entries:   counter("entries_sent_total", "Entries sent to subscribers."),
		bytes:     counter("entry_bytes_sent_total", "Bytes of entries sent to subscribers."),
		progress:  counter("progress_sent_total", "Progress messages sent to subscribers."),
		stalled:   counter("stalled_streams_total", "Streams ended because the client did not read, or read a snapshot too slowly."),
		unread:    counter("unread_connections_total", "Connections closed because the client did not read an answer, or the end of a stream."),
		evicted:   counter("evicted_before_read_total", "Times that entries were evicted before a stream had read them. It continues with a snapshot, or ends with POSITION_COMPACTED."),
		late:      counter("late_requests_total", "Calls canceled because their request was not received in time."),
		panics:    counter("panics_total", "Calls ended by a panic; the log has the stack."),
		delay: all.NewHistogram(prometheus.HistogramOpts{
			Name:    "engine_delay_seconds",
			Help:    "Time from the engine's time of a batch until a response with its entry is sent to a subscriber, of the first entry of each response. Entries that were appended before the stream began are not observed.",
			Buckets: prometheus.ExponentialBuckets(500e-6, 2, 18), // 500 µs to 65 s
		}),

		matchedPrompts: counter("matched_prompts_total", "Prompts matched by MatchPrefix and MatchPrefixes."),
		matches:        counter("matches_total", "Matches returned, one for each dp rank that holds a prefix of a prompt, or is expected to."),
		matchSeconds: all.NewHistogram(prometheus.HistogramOpts{
			Name: "match_seconds", Help: "Time to answer a request of MatchPrefix or MatchPrefixes, without waiting for a position.",
			Buckets: prometheus.ExponentialBuckets(4e-6, 4, 10), // 4 µs to 1 s
		}),
		byModel:       newModelMetrics(all),
		routed:        counter("routed_prompts_total", "Prompts of NoteRouted and MatchPrefixes that were routed to dp ranks."),
		routedIgnored: counter("routed_prompts_ignored_total", "Routed prompts that were ignored: of unknown ranks, without a whole block, or too many."),
	}
}

// sent records that a response was sent whose encoded entries begin with first. The clock of the engine may be ahead of this
// machine's, which the index counts.
func (m *metrics) sent(first []byte) {
	if t := engineTime(first); t > 0 {
		m.delay.Observe(max(0, time.Since(time.Unix(0, t))).Seconds())
	}
}

// engineTime returns the engine's time in the first of encoded entries, in nanoseconds since the Unix epoch; 0 if it has none.
func engineTime(entries []byte) int64 {
	var f encode.Field
	_, err := f.Next(entries)
	for b := f.Bytes; err == nil && len(b) > 0; {
		b, err = f.Next(b)
		switch {
		case err != nil || f.Number == kvcastv1.EntryEventsField:
			return 0
		case f.Number == kvcastv1.EntryEngineTimeUnixNanoField:
			return int64(f.Value)
		}
	}
	return 0
}

// matched counts an answer to a query.
func (m *metrics) matched(q *index.Query, r *match.Response, took time.Duration) {
	var matches int
	var queried, matched amount
	for i, found := range r.Matches.Prompts {
		tokens, blocks := r.Matches.Queried(q, i)
		queried.add(tokens, blocks)
		if len(found) > 0 {
			best := &found[0]
			for i := range found {
				if best.Expected == 0 {
					break // no other holds more
				}
				if found[i].Blocks > best.Blocks {
					best = &found[i]
				}
			}
			matched.add(best.Blocks*int(best.BlockSize), best.Blocks)
		}
		matches += len(found)
	}
	m.matchedPrompts.Add(float64(len(r.Matches.Prompts)))
	m.matches.Add(float64(matches))
	m.matchSeconds.Observe(took.Seconds())
	model := ""
	if r.Matches.HasModel(q) {
		model = q.Model
	}
	m.byModel.matched(model, queried, matched)
}

// amount is an amount of a prompt.
type amount struct{ tokens, blocks int }

func (a *amount) add(tokens, blocks int) { a.tokens, a.blocks = a.tokens+tokens, a.blocks+blocks }

// maxModels bounds the models that have counters. The matches of further ones are counted as those without a model.
const maxModels = 1_000

// modelMetrics count what was queried and matched, by model.
type modelMetrics struct {
	vectors modelVectors

	mu     sync.RWMutex
	models map[string]*modelCounters // guarded by mu
}

// modelVectors and modelCounters are queried tokens and blocks, and matched tokens and blocks.
type (
	modelVectors  [4]*prometheus.CounterVec
	modelCounters [4]prometheus.Counter
)

func newModelMetrics(all promauto.Factory) *modelMetrics {
	vector := func(name, help string) *prometheus.CounterVec {
		return all.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{"model"})
	}
	m := &modelMetrics{
		vectors: modelVectors{
			vector("queried_tokens_total", "Tokens of the prompts matched by MatchPrefix and MatchPrefixes, by the request's model."),
			vector("queried_blocks_total", "Whole blocks of these prompts."),
			vector("matched_tokens_total", "Tokens in the best match of each prompt, by the request's model."),
			vector("matched_blocks_total", "Blocks in the best match of each prompt, by the request's model."),
		},
		models: make(map[string]*modelCounters),
	}
	m.of("")
	return m
}

// of returns the counters of a model.
func (m *modelMetrics) of(model string) *modelCounters {
	m.mu.RLock()
	found, n := m.models[model], len(m.models)
	m.mu.RUnlock()
	switch {
	case found != nil:
		return found
	case n > maxModels:
		return m.of("")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	found = new(modelCounters)
	for i, vector := range m.vectors {
		found[i] = vector.WithLabelValues(model)
	}
	m.models[strings.Clone(model)] = found
	return found
}

// matched counts what was queried and matched of a model; empty: of none, or of one without workers.
func (m *modelMetrics) matched(model string, queried, matched amount) {
	counters := m.of(model)
	for i, n := range [...]int{queried.tokens, queried.blocks, matched.tokens, matched.blocks} {
		counters[i].Add(float64(n))
	}
}

var (
	descBlocks     = prometheus.NewDesc("kvcast_index_blocks", "Distinct blocks.", []string{"worker", "dp_rank", "tier"}, nil)
	descIncomplete = prometheus.NewDesc("kvcast_index_incomplete",
		"1 if the blocks of a dp rank may differ from the engine's.", []string{"worker", "dp_rank"}, nil)
	descDegraded = prometheus.NewDesc("kvcast_index_degraded",
		"1 for each reason for which the blocks of a dp rank may differ from the engine's, in any tier.", []string{"worker", "dp_rank", "reason"}, nil)
	descExpected = prometheus.NewDesc("kvcast_index_expected_blocks",
		"Blocks that dp ranks are expected to store, because prompts were routed to them, counted for each prompt.", nil, nil)
	tierNames = [kvblock.NumTiers]string{"device", "host_pinned", "disk", "external"}
)

// reasonName returns the metric label of a reason.
func reasonName(r kvcastv1.DegradedReason) string {
	return strings.ToLower(strings.TrimPrefix(r.String(), "DEGRADED_REASON_"))
}

// indexMetrics collects the metrics of an index. A worker's metrics are removed with it.
type indexMetrics struct{ *index.Index }

func (indexMetrics) Describe(ch chan<- *prometheus.Desc) {
	ch <- descBlocks
	ch <- descIncomplete
	ch <- descDegraded
	ch <- descExpected
}

func (m indexMetrics) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.MustNewConstMetric(descExpected, prometheus.GaugeValue, float64(m.ExpectedBlocks()))
	workers, _ := m.Workers(nil)
	for _, w := range workers {
		for _, r := range w.Ranks {
			rank, incomplete := strconv.FormatUint(uint64(r.Rank), 10), 0.0
			if r.Reasons != 0 {
				incomplete = 1
			}
			ch <- prometheus.MustNewConstMetric(descIncomplete, prometheus.GaugeValue, incomplete, w.Name, rank)
			for reason := range r.Reasons.All() {
				ch <- prometheus.MustNewConstMetric(descDegraded, prometheus.GaugeValue, 1, w.Name, rank, reasonName(reason))
			}
			for tier, d := range r.Blocks {
				if r.UsedTiers&(1<<tier) != 0 {
					ch <- prometheus.MustNewConstMetric(descBlocks, prometheus.GaugeValue, float64(d.Blocks), w.Name, rank, tierNames[tier])
				}
			}
		}
	}
}
