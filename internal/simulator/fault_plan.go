package simulator

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/kvcast/kvcast/internal/simulator/blockpool"
)

// Faults is a plan of faults, at random batches, chosen batches, or both. The zero value has no faults.
//
// Batches are numbered from 0, across restarts, and including lost batches. The seed and the batch number alone decide
// whether a fault occurs; other faults and time do not matter.
type Faults struct {
	// Seed determines the random batches.
	Seed uint64
	// Rates are the probabilities of each fault at each batch, 0 to 1.
	Rates map[Fault]float64
	// At are the faults of chosen batches, by batch number.
	At map[uint64][]Fault

	// Delay is how many batches a message is delayed; 0 means 3.
	Delay uint64
	// Span is the duration of lasting faults in batches; 0 means 20.
	Span uint64
	// Flap is the duration of FaultFlap in batches; 0 means 3.
	Flap uint64
	// Late is the number of batches that FaultRestartLate loses, and of seqs that FaultRestartAhead skips; 0 means 5.
	Late uint64
}

// ParseFaults parses a plan such as "drop=0.01,restart@500": rates as NAME=RATE, and chosen batches
// as NAME@BATCH.
func ParseFaults(s string) (Faults, error) {
	f := Faults{Rates: make(map[Fault]float64), At: make(map[uint64][]Fault)}
	for item := range strings.SplitSeq(s, ",") {
		item = strings.TrimSpace(item)
		i := strings.IndexAny(item, "=@")
		if i < 0 {
			if _, err := ParseFault(item); err != nil {
				return Faults{}, err
			}
			return Faults{}, fmt.Errorf("%q does not say how often: want NAME=RATE or NAME@BATCH", item)
		}
		fault, err := ParseFault(item[:i])
		if err != nil {
			return Faults{}, err
		}
		value := item[i+1:]
		if item[i] == '@' {
			n, err := strconv.ParseUint(value, 10, 64)
			if err != nil {
				return Faults{}, fmt.Errorf("%s@%s is not allowed: want the number of a batch, from 0", fault, value)
			}
			f.At[n] = append(f.At[n], fault)
			continue
		}
		if _, twice := f.Rates[fault]; twice {
			return Faults{}, fmt.Errorf("%s is given two rates: want one", fault)
		}
		rate, err := strconv.ParseFloat(value, 64)
		if err != nil || !isProbability(rate) {
			return Faults{}, fmt.Errorf("%s=%s is not allowed: want a rate of 0 to 1 a batch", fault, value)
		}
		f.Rates[fault] = rate
	}
	return f, nil
}

func isProbability(x float64) bool { return x >= 0 && x <= 1 }

func (f Faults) withDefaults() (Faults, error) {
	orElse := func(field *uint64, value uint64) {
		if *field == 0 {
			*field = value
		}
	}
	orElse(&f.Delay, 3)
	orElse(&f.Span, 20)
	orElse(&f.Flap, 3)
	orElse(&f.Late, 5)
	known := func(fault Fault) error {
		if fault < 0 || fault >= numFaults {
			return fmt.Errorf("configure faults: %s is no fault", fault)
		}
		return nil
	}
	for fault, rate := range f.Rates {
		if err := known(fault); err != nil {
			return f, err
		}
		if !isProbability(rate) {
			return f, fmt.Errorf("configure faults: %s=%v is not allowed: want a rate of 0 to 1 a batch", fault, rate)
		}
	}
	for _, faults := range f.At {
		for _, fault := range faults {
			if err := known(fault); err != nil {
				return f, err
			}
		}
	}
	f.Rates, f.At = maps.Clone(f.Rates), maps.Clone(f.At)
	return f, nil
}

// OfBatch returns the faults of a batch, without repetition, in the order of their constants.
func (f Faults) OfBatch(batch uint64) []Fault {
	if len(f.Rates) == 0 && len(f.At) == 0 {
		return nil
	}
	var all []Fault
	hasBatchFault, hasEngineFault := false, false
	for fault := Fault(0); fault < numFaults; fault++ {
		// A rate of 1 always applies, because draws are below 1.
		rate := f.Rates[fault]
		if draw(f.Seed, batch, uint64(fault)) >= rate && !slices.Contains(f.At[batch], fault) {
			continue
		}
		if fault.affectsBatch() && hasBatchFault || fault.affectsEngine() && hasEngineFault {
			continue
		}
		hasBatchFault = hasBatchFault || fault.affectsBatch()
		hasEngineFault = hasEngineFault || fault.affectsEngine()
		all = append(all, fault)
	}
	return all
}

// draw returns a pseudorandom number in [0, 1) that depends only on its arguments.
func draw(seed, a, b uint64) float64 {
	return float64(blockpool.SplitMix64(blockpool.SplitMix64(blockpool.SplitMix64(seed)^a)^b)>>11) / (1 << 53)
}
