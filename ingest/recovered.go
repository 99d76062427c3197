package ingest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/ingest/internal/sequence"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// maxRecoveredSources bounds the index of a source in a stored state.
const maxRecoveredSources = 1 << 16

// recovered are the recovered workers that no worker has claimed.
type recovered struct {
	// mu guards workers and their fields. It is locked after a worker's mutex. It is held while a recovered worker is
	// removed from the stream, so that no worker of its name is added before.
	mu      sync.Mutex
	workers map[string]*recoveredWorker
}

// recoveredWorker is the decoded state of a worker.
type recoveredWorker struct {
	worker feed.Worker
	// states are the checkpoint and the changes since then.
	states []*statev1.IngestWorker
	// listener is the endpoint of the worker's listener; empty if it has none.
	listener   string
	publishers []*recoveredPublisher // in the order of sources and ranks
	// err is why the state cannot be used; nil if it can.
	err error
}

// recoveredPublisher is the decoded state of a publisher.
type recoveredPublisher struct {
	key        feed.Publisher
	cursor     sequence.Cursor
	rawID      uint64
	incomplete bool
	ranks      []uint32
	before     struct{ first, last uint64 }
	// described reports whether topic and address are known. They are those of a publisher of a listener.
	described bool
	topic     string
	address   netip.Addr
	// read reports whether there is a cursor.
	read bool
	// replay is the endpoint of the replay socket; empty if there is none or it is unknown.
	replay string
	// at is when the publisher is resumed.
	at time.Time
}

// load decodes the recovered workers of the Config.
func (r *recovered) load(s *shared) {
	r.workers = make(map[string]*recoveredWorker, len(s.config.Recovered))
	for i := range s.config.Recovered {
		r.restore(s, &s.config.Recovered[i])
	}
}

// restore decodes a recovered worker, which replaces another of its name.
func (r *recovered) restore(s *shared, from *feed.Recovered) {
	w := &recoveredWorker{worker: from.Worker}
	w.err = w.decode(from)
	r.mu.Lock()
	defer r.mu.Unlock()
	s.names.releaseRecovered(w.worker.Name)
	// The name of a listener's worker is claimed when the listener resumes it. Without publishers it may be any listener's.
	if w.err == nil && w.listener == "" && len(w.publishers) > 0 {
		s.names.reserveRecovered(w.worker.Name)
	}
	r.workers[w.worker.Name] = w
}

// drop forgets a recovered worker that no worker has claimed. It reports whether there was one.
func (r *recovered) drop(s *shared, name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, found := r.workers[name]
	delete(r.workers, name)
	s.names.releaseRecovered(name)
	return found
}

// Restore sets the state with which a worker continues, as Config.Recovered does: a worker that AddWorker adds later, or the
// worker of a listener when its engine next sends a message. It replaces an earlier state of that worker that none has used.
// RemoveUnclaimed applies to it too.
func (in *Ingest) Restore(r feed.Recovered) { in.shared.recovered.restore(in.shared, &r) }

// decode decodes a checkpoint, and the changes and cursors after it.
func (w *recoveredWorker) decode(from *feed.Recovered) error {
	publishers := make(map[feed.Publisher]*recoveredPublisher)
	at := func(source int, rank uint32) *recoveredPublisher {
		key := feed.Publisher{Source: source, Rank: rank}
		if publishers[key] == nil {
			publishers[key] = &recoveredPublisher{key: key}
		}
		return publishers[key]
	}
	all := from.Learned
	if from.Checkpoint != nil {
		all = append([][]byte{from.Checkpoint}, all...)
	}
	for _, b := range all {
		m := new(statev1.IngestWorker)
		if err := proto.Unmarshal(b, m); err != nil {
			return fmt.Errorf("decode state: %w", err)
		}
		if err := checkState(m); err != nil {
			return err
		}
		w.states = append(w.states, m)
		w.listener = cmp.Or(m.Listener, w.listener)
		for _, s := range m.Publishers {
			p := at(int(s.Source), s.Rank)
			if err := p.describe(s); err != nil {
				return err
			}
		}
	}
	for key, b := range from.Cursors {
		if len(b) == 0 {
			continue // before the first cursor
		}
		m := new(statev1.IngestCursor)
		if err := proto.Unmarshal(b, m); err != nil {
			return fmt.Errorf("decode cursor: %w", err)
		}
		if err := at(key.Source, key.Rank).setCursor(m); err != nil {
			return err
		}
	}
	for _, p := range publishers {
		switch {
		case !p.read:
		case w.listener != "" && !p.described:
			return errors.New("decode state: the topic of a publisher is missing")
		default:
			w.publishers = append(w.publishers, p)
		}
	}
	slices.SortFunc(w.publishers, func(a, b *recoveredPublisher) int {
		return cmp.Or(cmp.Compare(a.key.Source, b.key.Source), cmp.Compare(a.key.Rank, b.key.Rank))
	})
	return nil
}

// checkVersion returns an error if a message is of a later version of kvcast.
func checkVersion(version uint32) error {
	if version > stateVersion {
		return fmt.Errorf("decode state: version %d is unknown, want at most %d: a later kvcast has written it", version, stateVersion)
	}
	return nil
}

func checkState(m *statev1.IngestWorker) error {
	if err := checkVersion(m.Version); err != nil {
		return err
	}
	for _, s := range m.Sources {
		if s.Source >= maxRecoveredSources {
			return fmt.Errorf("decode state: source %d is out of range", s.Source)
		}
		if err := wire.CheckState(s); err != nil {
			return fmt.Errorf("decode state of source %d: %w", s.Source, err)
		}
	}
	return nil
}

// describe adds a stored publisher.
func (p *recoveredPublisher) describe(s *statev1.IngestPublisher) (err error) {
	if s.Source >= maxRecoveredSources {
		return fmt.Errorf("decode state: source %d is out of range", s.Source)
	}
	p.described, p.topic = true, string(s.Topic)
	if s.Address != "" {
		if p.address, err = netip.ParseAddr(s.Address); err != nil {
			return fmt.Errorf("decode state: %w", err)
		}
	}
	if s.Cursor != nil {
		return p.setCursor(s.Cursor)
	}
	return nil
}

func (p *recoveredPublisher) setCursor(m *statev1.IngestCursor) error {
	if err := checkVersion(m.Version); err != nil {
		return err
	}
	if m.BatchAge != nil && (m.Seq == nil || *m.BatchAge > *m.Seq) {
		return errors.New("decode cursor: the last batch has no seq")
	}
	if len(m.Ranks) > feed.MaxRanks {
		return fmt.Errorf("decode cursor: %d ranks, want at most %d", len(m.Ranks), feed.MaxRanks)
	}
	p.read = true
	p.cursor = sequence.Cursor{
		Started: m.Seq != nil, Seq: m.GetSeq(),
		Delivered: m.BatchAge != nil, Batch: m.GetSeq() - m.GetBatchAge(),
		Fingerprint: sequence.Fingerprint{Time: m.BatchTime, Hash: m.BatchHash},
		Epoch:       string(m.Epoch), EpochKnown: m.Epoch != nil, Publisher: string(m.PublisherId),
		Restarted: m.Restarted, PossibleRestart: m.PossibleRestart, Conflicted: m.Conflicted, HasReplay: m.HasReplay, Restoring: m.Restoring,
		Proved: m.Proved, Unproved: m.Unproved, Lost: m.Lost,
	}
	if m.BatchAge == nil {
		p.cursor.Batch = 0
	}
	p.rawID, p.incomplete, p.ranks = m.RawEventId, m.Incomplete, m.Ranks
	p.before.first, p.before.last = m.BeforeFirst, m.BeforeLast
	return nil
}

// of returns the recovered worker of a name that has publishers to resume; nil if there is none.
func (r *recovered) of(name string) *recoveredWorker {
	r.mu.Lock()
	defer r.mu.Unlock()
	if w := r.workers[name]; w != nil && w.err == nil && len(w.publishers) > 0 {
		return w
	}
	return nil
}

// ofListener returns the workers of a listener, in the order of their names.
func (r *recovered) ofListener(bind string) (all []*recoveredWorker) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(r.workers)) {
		if w := r.workers[name]; w.err == nil && w.listener == bind {
			all = append(all, w)
		}
	}
	return all
}

// claim resumes a worker that is about to be added to the stream, and reports whether any of its publishers was
// resumed. If it cannot be resumed, the recovered worker of its name is removed from the stream. The worker's mutex is held.
func (r *recovered) claim(w *worker) (resumed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	from := r.workers[w.desc.Name]
	if from == nil {
		return false
	}
	delete(r.workers, w.desc.Name)
	if err := w.resume(from); err != nil {
		w.log.Warn("worker starts anew: its stored state cannot be used; routers get the blocks that its engines can still report", "error", err)
		w.shared.sink.RemoveWorker(w.desc.Name, feed.RemovedDisconnected)
		return false
	}
	w.log.Info("worker resumed", "publishers", len(from.publishers))
	return len(from.publishers) > 0
}

// abandonListeners makes the workers start anew whose listener is not configured any more.
func (r *recovered) abandonListeners() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, w := range r.workers {
		if w.err == nil && w.listener != "" {
			w.err = fmt.Errorf("the listener %s is not configured any more", w.listener)
		}
	}
}

// remove removes all workers from the stream.
func (r *recovered) remove(s *shared) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(r.workers)) {
		s.config.Logger.Info("worker removed: it was in the stream when kvcast ended, and is not configured any more", "worker", name)
		s.sink.RemoveWorker(name, feed.RemovedDiscovery)
		s.names.releaseRecovered(name)
	}
	clear(r.workers)
}

// RemoveUnclaimed removes the workers of Config.Recovered that were not added again: those of AddWorker that it has not
// added since, and those whose configuration or state does not permit it. It waits until Run is called, or ctx is done. It
// returns config.ErrEnded, or the error of ctx.
func (in *Ingest) RemoveUnclaimed(ctx context.Context) error {
	return in.change(ctx, func(context.Context, *running) { in.shared.recovered.remove(in.shared) })
}

// resume continues where a worker of an earlier Ingest ended. If it returns an error, it has changed nothing.
func (w *worker) resume(from *recoveredWorker) error {
	switch {
	case from.err != nil:
		return from.err
	case !w.desc.Continues(&from.worker):
		return errors.New("the worker's configuration has changed")
	}
	publishers := make(map[feed.Publisher]*publisher, len(w.publishers))
	for _, p := range w.publishers {
		publishers[feed.Publisher{Source: p.source, Rank: p.rank}] = p
	}
	for _, s := range from.publishers {
		if publishers[s.key] == nil {
			return fmt.Errorf("source %d has no dp rank %d any more", s.key.Source, s.key.Rank)
		}
	}
	for _, m := range from.states {
		if m.BlockSize != nil {
			w.blockSize.Restore(m.BlockSize)
		}
		for _, s := range m.Sources {
			w.rulesOf(int(s.Source)).Restore(s)
		}
	}
	w.storedBlockSize = w.blockSize
	now := time.Now()
	for _, s := range from.publishers {
		p := publishers[s.key]
		s.at = now
		if p.replayOf == nil {
			s.replay = p.status.Replay
		}
		p.resume(s)
	}
	return nil
}

// adopt adds the recovered workers of the listener to the stream, as if their engines had just disconnected.
func (l *listener) adopt() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, from := range l.shared.recovered.ofListener(l.config.Bind) {
		l.adoptWorker(from)
	}
}

// adoptWorker adds a recovered worker to the stream. If it cannot be resumed, it starts anew when its engine connects.
func (l *listener) adoptWorker(from *recoveredWorker) {
	err := l.resume(from)
	if err == nil {
		return
	}
	l.log.Warn("recovered worker not resumed: it starts anew when its engine connects", "worker", from.worker.Name, "error", err)
	l.shared.recovered.mu.Lock()
	from.err = err
	l.shared.recovered.mu.Unlock()
	if w := l.workers[from.worker.Name]; w != nil {
		l.dropWorker(w)
	}
}

// resume adds a recovered worker with its topics and publishers.
func (l *listener) resume(from *recoveredWorker) error {
	for _, s := range from.publishers {
		t := l.topics[s.topic]
		if t == nil {
			var why refusal
			var ok bool
			if t, why, ok = l.accept([]byte(s.topic), s.address); !ok {
				return fmt.Errorf("topic %q: %v", s.topic, why)
			}
			t.source = s.key.Source
			t.worker.topics = max(t.worker.topics, t.source+1)
		}
		if t.worker.desc.Name != from.worker.Name || t.source != s.key.Source {
			return fmt.Errorf("topic %q is of another worker or source", s.topic)
		}
		if _, why, ok := l.addPublisher(t, s.key.Rank, s.address); !ok {
			return fmt.Errorf("topic %q, rank %d: %v", s.topic, s.key.Rank, why)
		}
		t.worker.mu.Lock()
		s.replay = l.replayEndpoint(t, s.key.Rank, s.address)
		t.worker.mu.Unlock()
	}
	w := l.workers[from.worker.Name]
	if w == nil || !w.desc.Continues(&from.worker) {
		return errors.New("the listener's configuration has changed")
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.enter()
	return nil
}
