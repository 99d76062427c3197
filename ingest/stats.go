package ingest

import (
	dto "github.com/prometheus/client_model/go"

	"github.com/prometheus/client_golang/prometheus"
)

// WorkerStats is what was counted for a worker since it was added.
type WorkerStats struct {
	// ConnectAttempts counts the attempts to connect, Connections those that
	// succeeded, ConnectFailures those that failed and are repeated. Disconnections
	// counts the connections that broke, or were closed by Reconnect.
	ConnectAttempts uint64
	Connections     uint64
	ConnectFailures uint64
	Disconnections  uint64

	// Messages counts those received from the publishers. Replies to replay requests are
	// not among them.
	Messages uint64
	// Batches counts those delivered, live and by replay, each once. Of their events
	// Stored, Removed and Cleared count those of each kind, Skipped those left out.
	Batches uint64
	Stored  uint64
	Removed uint64
	Cleared uint64
	Skipped uint64
	// Duplicates counts batches that were read before, Rejected those that do not decode,
	// Refused messages that are no batch.
	Duplicates uint64
	Rejected   uint64
	Refused    uint64
	// Gaps counts the gaps reported, Missed the batches that they lack.
	Gaps   uint64
	Missed uint64
	// Restarts counts restarts of engines.
	Restarts uint64
	// Replays counts the repairs started, ReplaysDone and ReplaysFailed those that ended,
	// Replayed the batches that they brought.
	Replays       uint64
	ReplaysDone   uint64
	ReplaysFailed uint64
	Replayed      uint64
}

// Stats returns what was counted for a configured worker. ok is false where there is none
// of that name.
func (in *Ingest) Stats(worker string) (s WorkerStats, ok bool) {
	for _, w := range in.workers {
		if w.desc.Name == worker {
			return w.metrics.stats(), true
		}
	}
	return WorkerStats{}, false
}

func (m *workerMetrics) stats() WorkerStats {
	return WorkerStats{
		ConnectAttempts: value(m.connectAttempts),
		Connections:     value(m.connections),
		ConnectFailures: value(m.connectFailures),
		Disconnections:  value(m.disconnections),
		Messages:        value(m.messages),
		Batches:         value(m.batches),
		Stored:          value(m.stored),
		Removed:         value(m.removed),
		Cleared:         value(m.cleared),
		Skipped:         m.sum(m.all.skipped),
		Duplicates:      value(m.duplicates),
		Rejected:        m.sum(m.all.rejected),
		Refused:         m.sum(m.all.refused),
		Gaps:            value(m.gaps),
		Missed:          value(m.missed),
		Restarts:        value(m.restarts),
		Replays:         m.sum(m.all.replays),
		ReplaysDone:     value(m.replaysDone),
		ReplaysFailed:   value(m.replaysFailed),
		Replayed:        value(m.replayed),
	}
}

func value(m prometheus.Metric) uint64 {
	var d dto.Metric
	if m.Write(&d) != nil {
		return 0
	}
	return uint64(d.GetCounter().GetValue())
}

// sum returns what a vector has counted for the worker, over its other labels.
func (m *workerMetrics) sum(v *prometheus.CounterVec) (total uint64) {
	all := make(chan prometheus.Metric)
	go func() {
		defer close(all)
		v.Collect(all)
	}()
	for metric := range all {
		var d dto.Metric
		if metric.Write(&d) != nil {
			continue
		}
		for _, l := range d.GetLabel() {
			if l.GetName() == "worker" && l.GetValue() == m.worker {
				total += uint64(d.GetCounter().GetValue())
			}
		}
	}
	return total
}

// Reconnect closes the connections to a configured worker, which are then made anew as if
// they had broken. It may have to wait for a call of the worker's lane. It returns how
// many connections there were before; ok is false where there is no such worker.
func (in *Ingest) Reconnect(worker string) (connections uint64, ok bool) {
	for _, w := range in.workers {
		if w.desc.Name != worker {
			continue
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		connections = value(w.metrics.connections) // none is counted while the mutex is held
		for _, l := range w.links {
			l.breakOff()
		}
		return connections, true
	}
	return 0, false
}
