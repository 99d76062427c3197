package main

import (
	"context"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// sourceStates are the states of ingest in the contract's words.
var sourceStates = map[ingest.SourceState]kvcastv1.SourceState{
	ingest.SourceConnecting: kvcastv1.SourceState_SOURCE_STATE_CONNECTING,
	ingest.SourceCatchingUp: kvcastv1.SourceState_SOURCE_STATE_CATCHING_UP,
	ingest.SourceLive:       kvcastv1.SourceState_SOURCE_STATE_LIVE,
	ingest.SourceRepairing:  kvcastv1.SourceState_SOURCE_STATE_REPAIRING,
	ingest.SourceSuspect:    kvcastv1.SourceState_SOURCE_STATE_SUSPECT,
	ingest.SourceStopped:    kvcastv1.SourceState_SOURCE_STATE_STOPPED,
}

// sourceStatus tells the sources of each worker.
func (s *service) sourceStatus() map[string][]*kvcastv1.SourceStatus {
	all := make(map[string][]*kvcastv1.SourceStatus)
	for _, src := range s.ingest.Sources() {
		all[src.Worker] = append(all[src.Worker], &kvcastv1.SourceStatus{
			Engine:         string(src.Engine),
			Endpoint:       src.Endpoint,
			ReplayEndpoint: src.Replay,
			DpRank:         src.Rank,
			State:          sourceStates[src.State],
			Started:        src.Started,
			LastSeq:        src.LastSeq,
		})
	}
	return all
}

// registered are the workers of a service as the server changes them, which is
// made before that which reads them.
type registered struct{ *service }

// AddWorker implements server.Workers.
func (r registered) AddWorker(ctx context.Context, w ingestconfig.Worker) error {
	return r.ingest.AddWorker(ctx, w)
}

// RemoveWorker implements server.Workers.
func (r registered) RemoveWorker(ctx context.Context, name string, why feed.RemoveReason) error {
	return r.ingest.RemoveWorker(ctx, name, why)
}
