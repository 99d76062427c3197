package member

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/recovery"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/cluster"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// execute executes an action, and gives the machine the result.
func (m *Member) execute(ctx context.Context, a cluster.Action) {
	log := m.cfg.Log.With("worker", a.Worker, "reason", a.Reason.String())
	began := time.Now()
	switch a.Kind {
	case cluster.Claim:
		seq, err := m.claim(ctx, a)
		m.mu.Lock()
		defer m.mu.Unlock()
		m.claims.inProgress--
		if err != nil {
			if ctx.Err() == nil && !errors.Is(err, journal.ErrFenced) {
				log.Warn("a worker is not taken: it is tried again", "error", err)
			}
			delete(m.claims.recovered, a.Worker)
			m.machine.Claimed(a.Worker, false, time.Now())
			break
		}
		log.Info("worker taken", "seq", seq, "took", time.Since(began).Round(time.Millisecond))
		m.remember(kvcastv1.IncidentKind_INCIDENT_KIND_TAKEOVER, a, seq, began)
		m.claims.seqs[a.Worker] = seq
		m.metrics.takeovers.WithLabelValues(a.Reason.String()).Inc()
		m.metrics.takeoverTime.Observe(time.Since(began).Seconds())
		m.machine.Claimed(a.Worker, true, time.Now())
		if waiting := m.listened.waiting[a.Worker]; waiting != nil {
			delete(m.listened.waiting, a.Worker)
			waiting <- m.claims.takeRecovered(a.Worker)
		}
	case cluster.Release, cluster.Remove:
		seq, err := m.release(ctx, a)
		if err != nil {
			log.Warn("a worker is not handed over as planned", "action", a.Kind.String(), "to", a.To, "error", err)
		} else {
			m.metrics.releases.Inc()
			m.remember(kvcastv1.IncidentKind_INCIDENT_KIND_RELEASE, a, seq, began)
			log.Info("worker released", "action", a.Kind.String(), "to", a.To, "took", time.Since(began).Round(time.Millisecond))
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		m.claims.forget(a.Worker)
		m.machine.Released(a.Worker, seq, time.Now())
	case cluster.Drop:
		m.mu.Lock()
		m.listened.lose(a.Worker) // before a listener that drop unlocks claims it for the next message
		m.mu.Unlock()
		m.drop(ctx, a.Worker)
		m.mu.Lock()
		defer m.mu.Unlock()
		if owner := m.owners[a.Worker].Instance; owner != m.cfg.ID {
			log.Warn("worker dropped: another instance has it now", "owner", owner)
		}
		m.claims.forget(a.Worker)
		m.machine.Dropped(a.Worker, time.Now())
	}
	m.signal()
}

// remember remembers an action that is done.
func (m *Member) remember(kind kvcastv1.IncidentKind, a cluster.Action, seq uint64, began time.Time) {
	m.cfg.Incidents.Add(&kvcastv1.Incident{
		Kind: kind, Worker: a.Worker, Reason: a.Reason.String(), InstanceId: a.To, Seq: seq, DurationNano: uint64(time.Since(began)),
	})
}

// claim claims a worker, recovers it, and lets ingest read it. For a worker that is not wanted, the state of ingest waits in
// m.claims.recovered: its engine connects to a listener, or it will be removed.
func (m *Member) claim(ctx context.Context, a cluster.Action) (seq uint64, err error) {
	seen := m.parts.Journal.Owner(a.Worker)
	if seen.Seq > a.Seq {
		return 0, errOwned
	}
	m.mu.Lock()
	w, wanted := m.worker(a.Worker)
	m.mu.Unlock()
	source := journal.Source{Worker: a.Worker, Model: w.Model}
	if known, ok := m.parts.Follower.Index().Worker(a.Worker); ok && source.Model == "" {
		source.Model = known.Model
	}
	if seq, err = m.parts.Journal.Claim(ctx, source, seen); err != nil {
		return 0, err
	}
	defer func() {
		if err != nil {
			m.drop(ctx, a.Worker)
		}
	}()
	if err := m.parts.Follower.Wait(ctx, seq); err != nil {
		return 0, err
	}
	recovered, err := m.recover(ctx, a.Worker, seq)
	if err != nil {
		return 0, fmt.Errorf("recover: %w", err)
	}
	if !wanted {
		m.mu.Lock()
		m.claims.recovered[a.Worker] = recovered
		m.mu.Unlock()
		return seq, nil
	}
	if recovered != nil {
		m.parts.Ingest.Restore(*recovered)
	}
	if err := m.parts.Ingest.AddWorker(ctx, w); err != nil {
		return 0, err
	}
	m.mu.Lock()
	m.claims.reading[a.Worker] = w
	m.mu.Unlock()
	return seq, nil
}

// recover adds the state of a worker at its claim to the pipeline.
func (m *Member) recover(ctx context.Context, worker string, claim uint64) (*feed.Recovered, error) {
	state, err := recovery.Worker(ctx, m.parts.Journal, m.parts.Journal.Checkpoints(), m.cfg.Log, m.parts.Follower.Index(), worker, claim, m.parts.PipelineConfig)
	if err != nil {
		return nil, err
	}
	for name, cause := range state.Recovery.Lost() {
		m.cfg.Log.Warn("the state of a worker is lost: routers drop its blocks, and its engine is read again", "worker", name, "error", cause)
	}
	var recovered *feed.Recovered
	if all := state.Recovery.Workers(); len(all) > 0 {
		recovered = &all[0]
	}
	if err := m.parts.Pipeline.Adopt(state.Recovery); err != nil {
		return nil, err
	}
	if state.EventIDFloor > 0 {
		m.parts.Pipeline.SetEventIDFloor(worker, state.EventIDFloor)
	}
	return recovered, nil
}

// release stops reading a worker, hands over what it has appended, and writes the record. If it is to be removed, it removes
// it from the stream before.
func (m *Member) release(ctx context.Context, a cluster.Action) (seq uint64, err error) {
	m.mu.Lock()
	delete(m.claims.reading, a.Worker)
	m.mu.Unlock()
	if err := m.stopReading(ctx, a.Worker); err != nil {
		return 0, err
	}
	if m.parts.Journal.Owner(a.Worker).Instance != m.cfg.ID {
		m.drop(ctx, a.Worker)
		return 0, errOwned
	}
	if a.Kind == cluster.Remove {
		m.parts.Pipeline.RemoveWorker(a.Worker, m.whyRemoved(a.Worker))
	}
	if err := m.parts.Pipeline.Flush(ctx, a.Worker); err != nil {
		m.drop(ctx, a.Worker)
		return 0, err
	}
	if a.Kind == cluster.Remove {
		if err := m.parts.Journal.Checkpoints().Delete(ctx, recovery.CheckpointName(a.Worker)); err != nil {
			m.cfg.Log.Warn("the checkpoint of a removed worker is kept", "worker", a.Worker, "error", err)
		}
	}
	seq, err = m.parts.Journal.Release(ctx, a.Worker, a.To)
	if seq == 0 && err == nil { // an earlier action has failed after the claim
		m.mu.Lock()
		w, _ := m.worker(a.Worker)
		m.mu.Unlock()
		if _, err = m.parts.Journal.Claim(ctx, journal.Source{Worker: a.Worker, Model: w.Model}, m.parts.Journal.Owner(a.Worker)); err == nil {
			seq, err = m.parts.Journal.Release(ctx, a.Worker, a.To)
		}
	}
	m.parts.Pipeline.Drop(a.Worker)
	if err != nil {
		m.parts.Journal.Forget(a.Worker)
		return 0, err
	}
	return seq, nil
}

// whyRemoved returns why a worker is removed from the stream.
func (m *Member) whyRemoved(worker string) feed.RemoveReason {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.deregistered[worker] {
		delete(m.deregistered, worker)
		return feed.RemovedDeregistered
	}
	return feed.RemovedDiscovery
}

// drop forgets a worker without a record.
func (m *Member) drop(ctx context.Context, worker string) {
	m.mu.Lock()
	delete(m.claims.reading, worker)
	m.mu.Unlock()
	m.parts.Journal.Forget(worker)
	m.parts.Pipeline.Drop(worker)
	if err := m.stopReading(context.WithoutCancel(ctx), worker); err != nil {
		m.cfg.Log.Warn("reading of a worker does not stop", "worker", worker, "error", err)
	}
	m.parts.Pipeline.Drop(worker) // ingest may have added it meanwhile
}

// stopReading makes ingest forget a worker.
func (m *Member) stopReading(ctx context.Context, worker string) error {
	err := m.parts.Ingest.Release(ctx, worker)
	if errors.Is(err, ingestconfig.ErrNoWorker) || errors.Is(err, ingestconfig.ErrEnded) {
		return nil
	}
	return err
}
