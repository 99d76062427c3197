package kubernetes

import (
	"context"
	"testing"
	"testing/synctest"
)

// TestFollowMissesNoChange has a change before the store is followed, and one while the first is reported.
func TestFollowMissesNoChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &store{changed: make(chan struct{})}
		signal := func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.signal()
		}
		ctx, cancel := context.WithCancel(t.Context())
		next, reported := s.next(), 0
		signal()
		go s.follow(ctx, next, func() {
			if reported++; reported == 1 {
				signal()
			}
		})
		synctest.Wait()
		if reported != 2 {
			t.Errorf("%d changes were reported, want 2", reported)
		}
		cancel()
	})
}
