package simulator_test

import (
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/simulator"
)

func TestParseFaults(t *testing.T) {
	t.Parallel()
	got, err := simulator.ParseFaults("drop=0.25, restart@500,twice=1,drop@7,flap@7,mute=0")
	if err != nil {
		t.Fatal(err)
	}
	want := simulator.Faults{
		Rates: map[simulator.Fault]float64{simulator.FaultDrop: 0.25, simulator.FaultDuplicate: 1, simulator.FaultNoReplay: 0},
		At: map[uint64][]simulator.Fault{
			7: {simulator.FaultDrop, simulator.FaultFlap}, 500: {simulator.FaultRestart},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestParseFaultsErrorsSayWhatIsAllowed(t *testing.T) {
	t.Parallel()
	for plan, says := range map[string]string{
		"":                  "want one of drop, forget",
		"bogus=0.1":         `"bogus" is no fault: want one of drop,`,
		"Drop=0.1":          "want one of",
		"drop":              "want NAME=RATE or NAME@BATCH",
		"drop=":             "want a rate of 0 to 1",
		"drop=1.01":         "want a rate of 0 to 1",
		"drop=-0.1":         "want a rate of 0 to 1",
		"drop=NaN":          "want a rate of 0 to 1",
		"drop=1%":           "want a rate of 0 to 1",
		"drop=0.1,drop=0.2": "two rates",
		"drop@-1":           "want the number of a batch",
		"drop=0.1,":         "want one of",
	} {
		if _, err := simulator.ParseFaults(plan); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: got %v, want an error that contains %q", plan, err, says)
		} else if strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: got more than one line", plan)
		}
	}
}

func TestFaultsHaveNames(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, f := range simulator.AllFaults() {
		back, err := simulator.ParseFault(f.String())
		if err != nil || back != f || seen[f.String()] {
			t.Errorf("%s reads as %s (%v)", f, back, err)
		}
		seen[f.String()] = true
	}
	if got := simulator.Fault(-1).String(); got != "Fault(-1)" {
		t.Errorf("got %s", got)
	}
}

func TestFaultsHaveTheirRate(t *testing.T) {
	t.Parallel()
	const batches = 100_000
	for _, rate := range []float64{0, 0.001, 0.1, 0.9, 1} {
		f := simulator.Faults{Seed: 3, Rates: map[simulator.Fault]float64{simulator.FaultNoReplay: rate}}
		n := 0
		for i := range uint64(batches) {
			n += len(f.OfBatch(i))
		}
		// Six standard deviations.
		if off := math.Abs(float64(n) - rate*batches); off > 6*math.Sqrt(rate*(1-rate)*batches) {
			t.Errorf("at a rate of %v, %d of %d", rate, n, batches)
		}
	}
}

func TestFaultsAreIndependent(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		fault := rapid.SampledFrom(simulator.AllFaults()).Draw(t, "fault")
		other := rapid.SampledFrom(simulator.AllFaults()).Filter(func(f simulator.Fault) bool { return f > fault }).
			Filter(func(f simulator.Fault) bool { return f != fault })
		alone := simulator.Faults{Seed: seed, Rates: map[simulator.Fault]float64{fault: 0.2}}
		both := simulator.Faults{Seed: seed, Rates: map[simulator.Fault]float64{fault: 0.2}}
		if fault < simulator.FaultFlap {
			both.Rates[other.Draw(t, "other")] = 0.5
		}
		for batch := range uint64(100) {
			strikes := func(f simulator.Faults) bool {
				all := f.OfBatch(batch)
				return len(all) > 0 && all[0] == fault
			}
			if strikes(alone) != strikes(both) {
				t.Fatalf("fault %s at batch %d depends on other faults", fault, batch)
			}
			if diff := cmp.Diff(both.OfBatch(batch), both.OfBatch(batch)); diff != "" {
				t.Fatal(diff)
			}
		}
	})
}

func TestAtMostOneFaultOfAKindPerBatch(t *testing.T) {
	t.Parallel()
	f := simulator.Faults{Rates: map[simulator.Fault]float64{}, At: map[uint64][]simulator.Fault{0: simulator.AllFaults()}}
	want := []simulator.Fault{
		simulator.FaultDrop, simulator.FaultClearReplay, simulator.FaultPartialReplay, simulator.FaultReplayWithoutEnd,
		simulator.FaultNoReplay, simulator.FaultSilent, simulator.FaultUnresponsive, simulator.FaultRestart,
	}
	if diff := cmp.Diff(want, f.OfBatch(0)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := f.OfBatch(1); got != nil {
		t.Errorf("batch 1: got %v, want none", got)
	}
}

func TestOtherSeedsGiveOtherFaults(t *testing.T) {
	t.Parallel()
	at := func(seed uint64) (batches []uint64) {
		f := simulator.Faults{Seed: seed, Rates: map[simulator.Fault]float64{simulator.FaultDrop: 0.1}}
		for i := range uint64(200) {
			if f.OfBatch(i) != nil {
				batches = append(batches, i)
			}
		}
		return batches
	}
	if cmp.Equal(at(1), at(2)) {
		t.Error("seeds 1 and 2 give faults at the same batches")
	}
}
