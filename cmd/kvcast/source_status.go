package main

import (
	"github.com/kvcast/kvcast/ingest"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// sourceStates are the states of ingest in the contract's words.
var sourceStates = map[ingest.SourceState]kvcastv1.SourceState{
	ingest.SourceConnecting: kvcastv1.SourceState_SOURCE_STATE_CONNECTING,
	ingest.SourceLive:       kvcastv1.SourceState_SOURCE_STATE_LIVE,
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
