package journaltest_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/journaltest"
)

func TestDelayedConforms(t *testing.T) {
	journaltest.Run(t, journaltest.Harness{
		Open: func(_ *testing.T, maxBytes int) journal.Journal {
			return journaltest.NewDelayed(journal.Config{MaxBytes: maxBytes}, 16, time.Microsecond)
		},
		Fail: func(j journal.Journal, s *journal.Source, err error) { j.(*journaltest.Delayed).Fail(s.Worker, err) },
	})
}

func TestUnacknowledgedEntriesAreInvisible(t *testing.T) {
	d := journaltest.NewDelayed(journal.Config{}, 4, 0)
	changed := d.Changed()
	p, err := d.Append(t.Context(), journaltest.Record(1, 10))
	if err != nil {
		t.Fatal(err)
	}
	if got := d.Bounds().Newest; got != 0 {
		t.Errorf("newest before the acknowledgement: got %d, want 0", got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.Wait(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled wait: got %v", err)
	}
	d.Acknowledge(1)
	<-changed
	if seq, err := p.Wait(t.Context()); seq != 1 || err != nil {
		t.Errorf("wait: got %d, %v, want 1", seq, err)
	}
}

func TestAppendBlocksWhileTooManyAreInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := journaltest.NewDelayed(journal.Config{}, 2, 0)
		for n := range 2 {
			if _, err := d.Append(t.Context(), journaltest.Record(n, 10)); err != nil {
				t.Fatal(err)
			}
		}
		done := make(chan error)
		go func() {
			_, err := d.Append(t.Context(), journaltest.Record(2, 10))
			done <- err
		}()
		synctest.Wait()
		select {
		case err := <-done:
			t.Fatalf("append beyond the bound returned %v, want it to block", err)
		default:
		}
		d.Acknowledge(1)
		if err := <-done; err != nil {
			t.Errorf("append after an acknowledgement: %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := d.Append(ctx, journaltest.Record(3, 10)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("append with a deadline: got %v", err)
		}
		if got := d.InFlight(); got != 2 {
			t.Errorf("in flight: got %d, want 2", got)
		}
		d.Acknowledge(2)
	})
}
