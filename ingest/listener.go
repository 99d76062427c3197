package ingest

import (
	"log/slog"
	"strings"
	"time"

	"github.com/kvcast/kvcast/ingest/wire"
)

// listener takes the messages of a bound socket apart: publishers are told by
// their topic and the dp rank in the batch, workers by the topic. What names
// them comes from the network, so all of it is checked and bounded.
//
// A batch that does not decode can not say its rank. It is counted, and taken for
// none's: the hole in its publisher's seqs tells that it is lost, with the next
// batch. Booked to the wrong rank, it would make that rank's own batch of this
// seq look like a restart, which empties a sound cache.
type listener struct {
	config   ListenerConfig
	address  string
	patterns []string // of the config, as matchTopic wants them
	// topics are those that were accepted, by what stands before the NUL.
	topics map[string]*boundTopic
	// workers are those of this listener, by name.
	workers map[string]*boundWorker

	sink    Sink
	board   *board
	roster  *roster
	metrics *metrics
	notices notices
	log     *slog.Logger
}

// boundTopic is the publishers of one topic: the dp ranks of one pod.
type boundTopic struct {
	worker *boundWorker
	source int
	ranks  map[uint32]*publisher
}

// boundWorker is a worker of a listener.
type boundWorker struct {
	*worker
	model string
	// topics and publishers count; there are MaxRanks publishers at most.
	topics     int
	publishers int
}

func newListener(c ListenerConfig, address string, sink Sink, r *roster, b *board, m *metrics, log *slog.Logger) *listener {
	l := &listener{
		config:  c,
		address: address,
		board:   b,
		topics:  make(map[string]*boundTopic),
		workers: make(map[string]*boundWorker),
		sink:    sink,
		roster:  r,
		metrics: m,
		log:     log.With("bind", c.Bind),
	}
	for _, p := range c.Topics {
		l.patterns = append(l.patterns, slashless(p))
	}
	return l
}

// message takes the next message of the socket.
func (l *listener) message(in *intake, m *message) {
	now := in.now()
	a, why, ok := m.open(&in.decoder)
	if !ok {
		l.refuse(why, now, m.frames[0])
		return
	}
	t := l.topics[string(a.topic)]
	if t == nil {
		// A batch that does not decode is not worth a worker.
		if a.err != nil {
			l.metrics.rejected.WithLabelValues("", rejection(a.err)).Inc()
			return
		}
		if t, why, ok = l.accept(a.topic); !ok {
			l.refuse(why, now, a.topic)
			return
		}
	}
	if p := l.publisher(t, &a, now); p != nil {
		p.take(in, &a)
	}
}

// publisher returns whose batch it is; nil if that can not be told, as it does
// not decode, or it may not be.
func (l *listener) publisher(t *boundTopic, a *arrival, now time.Time) *publisher {
	if a.err != nil {
		t.worker.metrics.reject(rejection(a.err))
		t.worker.warn(noticeRejected, now, "batch rejected", "seq", a.seq, "error", a.err)
		return nil
	}
	var rank uint32
	if a.batch.HasRank {
		rank = a.batch.Rank
	}
	p := t.ranks[rank]
	if p == nil {
		if t.worker.publishers >= MaxRanks || !t.worker.admitRank(rank) {
			t.worker.refuse(refusedRanks, now)
			return nil
		}
		t.worker.publishers++
		p = newPublisher(t.worker.worker, t.source, l.board, SourceStatus{Engine: l.config.Engine, Endpoint: l.address, Rank: rank}, l.metrics)
		t.ranks[rank] = p
	}
	return p
}

// accept begins to read a topic, and its worker if there is none yet.
func (l *listener) accept(topic []byte) (t *boundTopic, why refusal, ok bool) {
	if !matchTopic(l.patterns, string(topic)) {
		return nil, refusedTopic, false
	}
	parts, err := wire.ParseTopic(topic)
	name := l.config.Worker
	if name == "" {
		if err != nil {
			return nil, refusedTopic, false
		}
		name = parts.Pod
	}
	if !validName(name) || !validModel(parts.Model) {
		return nil, refusedName, false
	}
	w := l.workers[name]
	switch {
	case w == nil:
		// The name of a listener's one worker is reserved for it.
		if l.config.Worker == "" {
			if why, ok := l.roster.claim(name); !ok {
				return nil, why, false
			}
		}
		w = l.addWorker(name, parts.Model)
	case l.config.Worker == "" && w.model != parts.Model:
		return nil, refusedModel, false
	case w.publishers >= MaxRanks:
		return nil, refusedRanks, false
	}
	t = &boundTopic{worker: w, source: w.topics, ranks: make(map[uint32]*publisher, 1)}
	w.topics++
	l.topics[string(topic)] = t
	return t, 0, true
}

func (l *listener) addWorker(name, model string) *boundWorker {
	desc := Worker{Name: name, Model: model}
	w := &boundWorker{worker: newWorker(desc, l.metrics, l.log), model: model}
	w.lane = l.sink.AddWorker(desc)
	w.log.Info("worker added", "model", model)
	l.workers[name] = w
	return w
}

// refuse counts a message that is not taken.
func (l *listener) refuse(why refusal, now time.Time, topic []byte) {
	l.metrics.refused.WithLabelValues("", why.String()).Inc()
	if held, ok := l.notices.due(noticeOf(why), now); ok {
		const most = 128
		l.log.Warn("message refused", "reason", why.String(), "want", l.wanted(why),
			"topic", string(topic[:min(len(topic), most)]), "held_back", held)
	}
}

// wanted returns what is wanted here instead of what was refused.
func (l *listener) wanted(why refusal) string {
	patterns := strings.Join(l.config.Topics, " or ")
	switch {
	case why != refusedTopic || l.config.Worker == "" && patterns == DefaultTopics:
		return why.wanted()
	case l.config.Worker != "":
		return patterns
	default:
		return topicForm + " that matches " + patterns
	}
}

// stop ends all publishers.
func (l *listener) stop() {
	for _, t := range l.topics {
		for _, p := range t.ranks {
			p.stop()
		}
	}
}
