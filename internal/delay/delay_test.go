package delay

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestDelayIsForgotten(t *testing.T) {
	d := next(0, time.Hour)
	if d != longest {
		t.Fatalf("%v after a stop of an hour, want %v", d, longest)
	}
	for range 20 {
		d = next(d, 0)
	}
	if d < 480*time.Millisecond || d > 520*time.Millisecond {
		t.Errorf("%v after 2 s, want about half of %v", d, longest)
	}
	if d = next(d, 700*time.Millisecond); d != 700*time.Millisecond {
		t.Errorf("%v after a longer delay, want that", d)
	}
}

// In a bubble, goroutines run as soon as they are due.
func TestIdleMachineHasNoDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m Meter
		m.recent.Store(int64(longest))
		go m.Run(t.Context())
		time.Sleep(time.Minute)
		if d := m.Recent(); d > time.Millisecond {
			t.Errorf("delay %v, want none", d)
		}
	})
}
