package server

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvcast/kvcast/journal"
)

// TestPlacesAreGivenInTheOrderOfTheLine has five wait for two places, of whom one
// leaves the line.
func TestPlacesAreGivenInTheOrderOfTheLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &places{limit: 2, line: 5, wait: time.Minute}
		for range 2 {
			if err := p.enter(t.Context(), nil, time.Hour, nil); err != nil {
				t.Fatal(err)
			}
		}
		impatient, leave := context.WithCancel(t.Context())
		got := make(chan int, 5)
		left := make(chan error, 1)
		for n := range 5 {
			go func() {
				ctx := t.Context()
				if n == 1 {
					ctx = impatient
				}
				if err := p.enter(ctx, nil, time.Hour, nil); err != nil {
					left <- err
					return
				}
				got <- n
			}()
			synctest.Wait()
		}
		if err := p.enter(t.Context(), nil, time.Hour, nil); !errors.Is(err, errLineFull) {
			t.Errorf("a line of five: got %v, want %v", err, errLineFull)
		}
		leave()
		if err := <-left; !errors.Is(err, context.Canceled) {
			t.Errorf("one who left: got %v", err)
		}
		for _, want := range []int{0, 2, 3, 4} {
			p.leave()
			synctest.Wait()
			if n := <-got; n != want {
				t.Errorf("got a place: %d, want %d", n, want)
			}
			if taken, _ := p.count(); taken != 2 {
				t.Errorf("%d places are taken, want 2", taken)
			}
		}
		p.leave()
		p.leave()
		if taken, waiting := p.count(); taken != 0 || waiting != 0 {
			t.Errorf("at the end: %d taken, %d waiting", taken, waiting)
		}
	})
}

// TestNobodyWaitsInLineForEver waits for a place that does not come.
func TestNobodyWaitsInLineForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &places{limit: 1, line: 1, wait: time.Minute}
		if err := p.enter(t.Context(), nil, time.Hour, nil); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if err := p.enter(t.Context(), nil, time.Hour, nil); !errors.Is(err, errNoPlace) || time.Since(began) != time.Minute {
			t.Errorf("after %v: got %v, want %v after a minute", time.Since(began), err, errNoPlace)
		}
		stop := make(chan struct{})
		close(stop)
		if err := p.enter(t.Context(), stop, time.Hour, nil); !errors.Is(err, errStopped) {
			t.Errorf("stopped: got %v, want %v", err, errStopped)
		}
		if taken, waiting := p.count(); taken != 1 || waiting != 0 {
			t.Errorf("at the end: %d taken, %d waiting", taken, waiting)
		}
	})
}

// A process that was stopped for longer than a query waits finds every timer due.
func TestQueryWaitsInAProcessThatWasStopped(t *testing.T) {
	for range 20 {
		q := newQueryLimiter("lookup", 1)
		q.wait = 1
		if err := q.turn(t.Context(), journal.Bounds{}); err != nil {
			t.Fatal(err)
		}
		if err := q.turn(t.Context(), journal.Bounds{}); err == nil {
			t.Fatal("two queries have the one turn")
		}
		q.leave()
		if taken, waiting := q.count(); taken != 0 || waiting != 0 {
			t.Fatalf("%d turns are taken and %d are waited for after all", taken, waiting)
		}
	}
}
