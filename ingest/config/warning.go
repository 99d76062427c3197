package config

import (
	"fmt"

	"github.com/kvcast/kvcast/internal/feed"
)

const noModel = "no model: no request that names a model matches the worker"

// NoTopicModel is the text of the warning of a worker of a listener whose topic names no model.
const NoTopicModel = noModel + "; want a topic kv@POD@MODEL"

// Warning is a property of a worker that is allowed, and probably a mistake.
type Warning struct {
	// Source is the number of the source; negative if it is not that of one.
	Source int
	// Text says what is wrong, what follows from it, and what to do.
	Text string
}

// Warnings returns the warnings of a valid worker.
func (w Worker) Warnings() (all []Warning) {
	if w.Model == "" {
		all = append(all, Warning{-1, noModel + "; want model"})
	}
	for i, s := range w.withDefaults().Sources {
		connect, _ := ParseSource(s.Connect)
		hasReplay := s.Replay != "" || len(s.Ranks) > 0
		for _, r := range s.Ranks {
			hasReplay = hasReplay && r.Replay != ""
		}
		if connect.Transport == TransportSMG {
			all = append(all, Warning{i, "a relay of the engine's events leaves some out without telling, so that the worker is degraded (relayed); want the engine's own publisher, tcp://HOST:PORT"})
		}
		if s.Engine == feed.EngineVLLM && !connect.Called() && !hasReplay {
			all = append(all, Warning{i, "no replay socket: lost batches are reported and cannot be repaired; want replay, and replay_endpoint of the engine"})
		}
	}
	return all
}

// String returns the warning, with the number of the source if it is not the first.
func (w Warning) String() string {
	if w.Source > 0 {
		return fmt.Sprintf("source %d: %s", w.Source, w.Text)
	}
	return w.Text
}
