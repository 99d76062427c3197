package truth

import (
	"errors"
	"fmt"
)

// Counts is what a Checker has checked. Answers are counted once for each prompt and dp rank, by the trust in the device tier.
type Counts struct {
	// Requests and Failures are the numbers of calls that were answered and that failed.
	Requests, Failures uint64
	Exact, UpperBound  uint64
	Degraded           uint64 // not checked
	// Of the exact answers, Held have some blocks of the prompt, and Partial fewer than the whole prompt has. InFlight could have been
	// longer or shorter, since a batch was in flight.
	Held, Partial, InFlight uint64
	// Forgotten are answers that differ from the states that are remembered, and may show an older one.
	Forgotten uint64
	Wrong     uint64
}

// String formats the counts for a log.
func (c Counts) String() string {
	return fmt.Sprintf("%d requests and %d that failed; answers: %d exact (%d with blocks, %d of a part of the prompt, %d with batches in flight), %d upper bound, %d degraded, %d too old to check, %d wrong",
		c.Requests, c.Failures, c.Exact, c.Held, c.Partial, c.InFlight, c.UpperBound, c.Degraded, c.Forgotten, c.Wrong)
}

// minExact is the least number of exact answers of a test, and minExactShare their least share.
const (
	minExact      = 100
	minExactShare = 0.25
)

// Meaningful returns an error if too few answers were exact for the test to mean something.
func (c Counts) Meaningful() error {
	var errs []error
	if all := c.Exact + c.UpperBound + c.Degraded; c.Exact < minExact || float64(c.Exact) < minExactShare*float64(all) {
		errs = append(errs, fmt.Errorf("%d of %d answers were exact, want %d and a share of %v", c.Exact, all, minExact, minExactShare))
	}
	if c.Held*10 < c.Exact || c.Partial*10 < c.Exact {
		errs = append(errs, errors.New("hardly any exact answer had blocks, or hardly any prompt was evicted in part"))
	}
	if c.Forgotten*10 > c.Exact {
		errs = append(errs, errors.New("many answers were too old to check"))
	}
	if len(errs) > 0 {
		return fmt.Errorf("truth of exact answers was hardly checked: %w; %v", errors.Join(errs...), c)
	}
	return nil
}
