package server

import (
	"context"
	"sync"
)

// streams counts streams of a kind that are open, of which there may be so many.
type streams struct {
	limit int

	mu   sync.Mutex // guards all below
	open int
	none chan struct{} // closed when the last one ends; nil while nobody waits
}

// enter takes a place, and tells whether there was one.
func (s *streams) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open >= s.limit {
		return false
	}
	s.open++
	return true
}

// leave gives the place back, which enter gave.
func (s *streams) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open--; s.open == 0 && s.none != nil {
		close(s.none)
		s.none = nil
	}
}

func (s *streams) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open
}

// wait waits until no stream is open, or ctx is done.
func (s *streams) wait(ctx context.Context) {
	s.mu.Lock()
	if s.open == 0 {
		s.mu.Unlock()
		return
	}
	if s.none == nil {
		s.none = make(chan struct{})
	}
	none := s.none
	s.mu.Unlock()
	select {
	case <-none:
	case <-ctx.Done():
	}
}
