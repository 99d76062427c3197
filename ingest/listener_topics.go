package ingest

import (
	"context"
	"maps"
	"net/netip"
	"path"
	"strings"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/loglimit"
	"github.com/kvcast/kvcast/internal/wire"
)

// dropTopic removes a topic without publishers, and its worker if it has no other topic, so that refused topics take no memory.
func (l *listener) dropTopic(topic string, w *boundWorker) {
	if t := l.topics[topic]; t.source == w.topics-1 {
		w.topics-- // so that source numbers do not grow with refused topics
	}
	delete(l.topics, topic)
	for _, t := range l.topics {
		if t.worker == w {
			return
		}
	}
	if len(w.publishers) > 0 {
		return
	}
	l.removeWorker(w)
}

// removeWorker removes a worker without topics. The name of a listener's only worker stays reserved.
func (l *listener) removeWorker(w *boundWorker) {
	w.close()
	delete(l.workers, w.desc.Name)
	w.release()
	if l.config.Worker != "" {
		l.shared.names.reserve(w.desc.Name)
	}
}

// addPublisher adds the publisher of a dp rank, whose first batch comes from an address. If ok is false, it is refused.
func (l *listener) addPublisher(t *boundTopic, rank uint32, from netip.Addr) (p *publisher, why refusal, ok bool) {
	if why, ok := l.admit(t, rank, budget.AddressOf(from)); !ok {
		return nil, why, false
	}
	p = newPublisher(t.worker.worker, t.source, SourceStatus{Engine: l.config.Engine, Endpoint: l.address, Rank: rank}, nil)
	p.address, p.topic = from, t.name
	p.replayOf = func(c *peer) string { return l.replayEndpoint(t, rank, c.address) }
	p.copyRule = l.config.Copies.Rule(l.config.Engine)
	p.rules.ClearsDevice = l.config.Clears.Device(l.config.Engine)
	if p.rules.IsVLLM = l.config.Engine == feed.EngineVLLM; p.rules.IsVLLM {
		p.rules.FollowGroups(&l.config.Attention)
	}
	t.ranks[rank] = p
	return p, 0, true
}

// admit reserves the budgets of another publisher, whose first batch comes from an address.
func (l *listener) admit(t *boundTopic, rank uint32, from netip.Prefix) (why refusal, ok bool) {
	sources, addresses := l.shared.budgets.sources, l.shared.addresses
	switch {
	case len(t.worker.publishers) >= feed.MaxRanks:
		return refusedRanks, false
	case addresses.Reserve(from, 1) != nil:
		return refusedAddress, false
	case !sources.Reserve(1):
		addresses.Release(from, 1)
		return refusedSources, false
	case !t.worker.admitRank(rank):
		addresses.Release(from, 1)
		sources.Release(1)
		return refusedRanks, false
	}
	return 0, true
}

// replayEndpoint returns the endpoint of a publisher's replay socket; empty if there is none or it is
// not allowed. The worker's mutex is held.
func (l *listener) replayEndpoint(t *boundTopic, rank uint32, peer netip.Addr) string {
	if l.config.ReplayPort <= 0 || t.host == "" || rank >= feed.MaxRanks || l.config.ReplayPort+int(rank) > config.MaxPort {
		return ""
	}
	host, ok := config.ReplayHost(t.host, peer, l.hosts)
	if !ok {
		t.worker.log.Warn("no replay is requested: the topic names a host that is neither the peer's address nor allowed",
			"rank", rank, "host", t.host, "hint", "allow it with the listener's replay_hosts")
		return ""
	}
	return config.Endpoint{Transport: config.TransportTCP, Address: host, Port: l.config.ReplayPort}.OfRank(int(rank)).String()
}

// accept adds a topic that an address has named, and its worker unless it exists.
func (l *listener) accept(topic []byte, from netip.Addr) (t *boundTopic, why refusal, ok bool) {
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
	if !config.ValidName(name) || !config.ValidModel(parts.Model) {
		return nil, refusedName, false
	}
	w := l.workers[name]
	switch {
	case w == nil && l.shared.budgets.ranks.Full():
		return nil, refusedRanks, false
	case w == nil:
		// The name of a listener's only worker is reserved already.
		if l.config.Worker == "" {
			if why, ok := l.shared.names.claim(name, false); !ok {
				return nil, why, false
			}
		}
		w = l.addWorker(feed.Worker{Name: name, Model: parts.Model, Peer: from})
	case l.config.Worker == "" && w.desc.Model != parts.Model:
		return nil, refusedModel, false
	case len(w.publishers) >= feed.MaxRanks:
		return nil, refusedRanks, false
	}
	t = &boundTopic{worker: w, source: w.topics, name: string(topic), ranks: make(map[uint32]*publisher, 1)}
	if err == nil {
		t.host = parts.Host()
	}
	w.topics++
	l.topics[string(topic)] = t
	return t, 0, true
}

func (l *listener) addWorker(desc feed.Worker) *boundWorker {
	w := &boundWorker{worker: newWorker(l.shared, desc)}
	w.listener = l.config.Bind
	l.spawnIn(w.worker)
	w.onRemoved = func() { l.forget(w) }
	l.workers[desc.Name] = w
	return w
}

// forget removes a worker that the grace time has removed from the stream.
func (l *listener) forget(w *boundWorker) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w.mu.Lock()
	removed := w.lane == nil && !w.closed
	w.mu.Unlock()
	if !removed { // a connection has added it again, or the listener is closing
		return
	}
	l.dropWorker(w)
}

// dropWorker forgets a worker and its topics, as if its engines had disconnected. Its lane is not called any more.
func (l *listener) dropWorker(w *boundWorker) {
	if w.cancelClaim != nil {
		w.cancelClaim()
	}
	w.close()
	w.mu.Lock()
	w.detach()
	w.mu.Unlock()
	l.forgetTopics(w)
	for _, c := range l.peers.byID {
		maps.DeleteFunc(c.publishers, func(p *publisher, _ struct{}) bool { return p.worker == w.worker })
	}
	l.removeWorker(w)
}

func (l *listener) forgetTopics(w *boundWorker) {
	maps.DeleteFunc(l.topics, func(_ string, t *boundTopic) bool { return t.worker == w })
	w.topics = 0
}

// release forgets the worker of a name. It reports whether there was one.
func (l *listener) release(name string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := l.workers[name]
	if w == nil {
		return false
	}
	l.dropWorker(w)
	w.log.Debug("worker released")
	return true
}

// admitWorker lets a worker that is not in the stream enter it with its recovered state, if there is any. It calls
// Config.Claim, with the listener unlocked. It returns the topic again, which may be another boundTopic now. If ok is false,
// the worker does not enter; why is the reason unless it was logged.
func (l *listener) admitWorker(ctx context.Context, t *boundTopic) (_ *boundTopic, ok bool) {
	topic, from := t.name, t.worker.desc.Peer
	claim := l.shared.config.Claim
	if len(t.worker.publishers) > 0 && (claim != nil || l.shared.recovered.of(t.worker.desc.Name) != nil) {
		l.dropWorker(t.worker) // the grace time has removed it, and its publishers are not those that are resumed
		if t, ok = l.acceptAgain(topic, from); !ok {
			return nil, false
		}
	}
	w := t.worker
	if claim != nil && !l.claim(ctx, w) {
		return nil, false
	}
	recovered := l.shared.recovered.of(w.desc.Name)
	if recovered == nil {
		w.log.Info("worker added", "model", w.desc.Model)
		if w.desc.Model == "" {
			w.log.Warn(config.NoTopicModel)
		}
		return t, true
	}
	l.forgetTopics(w) // the recovered topics have their own sources
	l.adoptWorker(recovered)
	return l.acceptAgain(topic, from)
}

// acceptAgain returns a topic that was accepted before, and adds it again if it was removed.
func (l *listener) acceptAgain(topic string, from netip.Addr) (t *boundTopic, ok bool) {
	if t = l.topics[topic]; t != nil {
		return t, true
	}
	t, why, ok := l.accept([]byte(topic), from)
	if !ok {
		l.refuse(why, from, []byte(topic))
	}
	return t, ok
}

// claim calls Config.Claim for a worker without publishers, and keeps the recovered state. It returns false if the worker may
// not enter the stream, or was released meanwhile.
func (l *listener) claim(ctx context.Context, w *boundWorker) bool {
	ctx, w.cancelClaim = context.WithCancel(ctx)
	defer w.cancelClaim()
	l.mu.Unlock()
	recovered, err := l.shared.config.Claim(ctx, w.desc.Name)
	l.mu.Lock()
	if err == nil {
		err = ctx.Err() // it was claimed too late
	}
	switch {
	case l.workers[w.desc.Name] != w:
		return false
	case err != nil:
		if ctx.Err() == nil {
			w.log.Warn("worker does not enter the stream: it cannot be claimed", "error", err)
		}
		l.dropWorker(w)
		return false
	case recovered == nil:
		l.shared.recovered.drop(l.shared, w.desc.Name)
	default:
		l.shared.recovered.restore(l.shared, recovered)
	}
	return true
}

// refuse counts and logs a message that is refused.
func (l *listener) refuse(why refusal, from netip.Addr, topic []byte) {
	l.shared.metrics.listeners.incLabeled(refusedTotal, why.String())
	const maxLogged = 128
	l.log.Warn("message refused", loglimit.PeerAddress, from.String(), "reason", why.String(), "want", l.wanted(why),
		"topic", string(topic[:min(len(topic), maxLogged)]))
}

// wanted describes what the listener accepts instead of a refused message.
func (l *listener) wanted(why refusal) string {
	patterns := strings.Join(l.config.Topics, " or ")
	switch {
	case why != refusedTopic || l.config.Worker == "" && patterns == config.DefaultTopics:
		return why.wanted()
	case l.config.Worker != "":
		return patterns
	default:
		return topicForm + " that matches " + patterns
	}
}

// close stops the reading of all workers.
func (l *listener) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.workers {
		w.close()
	}
}

// topicForm is the form of a topic that names a worker.
const topicForm = "kv@POD@MODEL"

// matchTopic reports whether a topic matches one of the patterns, which are results of slashless.
func matchTopic(patterns []string, topic string) bool {
	topic = slashless(topic)
	for _, p := range patterns {
		if ok, err := path.Match(p, topic); err == nil && ok {
			return true
		}
	}
	return false
}

// slashless replaces slashes, which are special to path.Match, by NULs, which topics do not contain.
func slashless(s string) string { return strings.ReplaceAll(s, "/", "\x00") }
