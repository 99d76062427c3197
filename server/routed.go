package server

import (
	"context"
	"time"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/internal/admission"
	"github.com/kvcast/kvcast/server/internal/callerror"
	"github.com/kvcast/kvcast/server/match"
)

func (s routerEvents) NoteRouted(ctx context.Context, req *kvcastv1.NoteRoutedRequest) (*kvcastv1.NoteRoutedResponse, error) {
	if err := s.checkServing(); err != nil {
		return nil, err
	}
	if len(req.GetRouted()) == 0 {
		return nil, callerror.InvalidField(s.journal.Bounds(), "routed", "0 prompts are not allowed: want 1 to %d", match.MaxRouted)
	}
	ignored, err := s.noteRouted(ctx, req.GetRouted())
	if err != nil {
		return nil, err
	}
	return &kvcastv1.NoteRoutedResponse{Ignored: uint32(ignored)}, nil
}

// noteRouted notes prompts that were sent to dp ranks, and returns how many of them were ignored.
func (s *Server) noteRouted(ctx context.Context, all []*kvcastv1.RoutedPrompt) (ignored int, err error) {
	if len(all) == 0 {
		return 0, nil
	}
	if violations := match.CheckRouted(all); violations != nil {
		return 0, callerror.InvalidFields(violations, s.journal.Bounds())
	}
	release, err := s.AcquireMatch(ctx, match.RoutedBytes(all))
	if err != nil {
		return 0, err
	}
	defer release()
	caller, now := admission.AddressOf(ctx).String(), time.Now()
	for _, r := range all {
		prompt, ttl := match.Routed(r)
		if !s.index.NoteRouted(caller, r.GetWorker(), r.GetDpRank(), &prompt, now, now.Add(ttl)) {
			ignored++
		}
	}
	s.metrics.routed.Add(float64(len(all)))
	s.metrics.routedIgnored.Add(float64(ignored))
	return ignored, nil
}
