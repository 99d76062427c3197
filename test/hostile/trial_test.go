package hostile_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvcast/kvcast/test/harness"
)

// trial is an attack beside honest peers.
type trial struct {
	// attack runs until the context is done, and calls begun when it has reached what it attacks.
	attack func(ctx context.Context, begun func())
	// begun, if it is not nil, says in place of attack whether that is reached.
	begun func(harness.Metrics) bool
	// round has each honest peer do once what it does. At least so many rounds follow after the attack had its way.
	round  func()
	rounds int
	// forget, if it is not nil, forgets the rounds before the attack had its way.
	forget func()
	// mostMiB bounds the resident memory after each round, if it is not 0, and mostLogged the bytes that are logged.
	mostMiB, mostLogged int
}

// run runs the attack, with rounds beside it, and checks the bounds.
func (a trial) run(t *testing.T, s *harness.Server) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	before, logged := s.ResidentMiB(), s.LogBytes()
	var group sync.WaitGroup
	var hasBegun atomic.Bool
	group.Go(func() { a.attack(ctx, func() { hasBegun.Store(true) }) })
	peak := 0
	for begun, rounds, end := false, 0, time.Now().Add(10*harness.Timeout); !begun || rounds < a.rounds; {
		a.round()
		peak = max(peak, s.ResidentMiB())
		if begun {
			rounds++
			continue
		}
		if a.begun == nil {
			begun = hasBegun.Load()
		} else if m, err := s.Metrics(t.Context()); err != nil {
			t.Fatal(err)
		} else {
			begun = a.begun(m)
		}
		if begun && a.forget != nil {
			a.forget()
		} else if !begun && time.Now().After(end) {
			t.Fatal("the attack does not have its way")
		}
	}
	cancel()
	group.Wait()
	logged = s.LogBytes() - logged
	t.Logf("%d MiB resident before, at most %d during the attack; %d bytes logged", before, peak, logged)
	if a.mostMiB > 0 && peak > a.mostMiB {
		t.Errorf("%d MiB resident, want at most %d", peak, a.mostMiB)
	}
	if logged > a.mostLogged {
		t.Errorf("%d bytes logged, want at most %d", logged, a.mostLogged)
	}
}

// longest has the longest time that each kind of call took.
type longest map[string]time.Duration

// call makes a call, which may not fail, nor take longer than roundLimit.
func (l longest) call(t *testing.T, what string, call func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), roundLimit)
	defer cancel()
	start := time.Now()
	if err := call(ctx); err != nil {
		t.Errorf("%s: %v", what, err)
	}
	l[what] = max(l[what], time.Since(start))
}
