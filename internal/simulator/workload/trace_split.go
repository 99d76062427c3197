package workload

import "fmt"

// Policy is how requests are distributed over engines.
type Policy int

// The policies.
const (
	// PolicyRoundRobin assigns requests to the engines in turn.
	PolicyRoundRobin Policy = iota
	// PolicyPrefix assigns a request to the engine to which the longest prefix of its prompt was
	// assigned before; on a tie, to the engine with the fewest tokens. It excludes engines with over
	// 5 % and 65,536 tokens more than the least loaded engine. The policy ignores evictions, as does
	// a router that knows only the requests that it sent.
	PolicyPrefix
)

// validate returns an error for an unknown policy.
func (p Policy) validate() error {
	if p != PolicyRoundRobin && p != PolicyPrefix {
		return fmt.Errorf("split trace: policy %d is unknown", p)
	}
	return nil
}

// Split returns the requests of each of n engines, with their times unchanged.
func (t *Trace) Split(n int, policy Policy) ([]*Trace, error) {
	if err := policy.validate(); err != nil {
		return nil, err
	}
	if n < 1 {
		return nil, fmt.Errorf("split trace: over %d engines, want 1 or more", n)
	}
	parts := make([]*Trace, n)
	for i := range parts {
		parts[i] = &Trace{}
	}
	s := newSplitter(n)
	for i, req := range t.Requests {
		to := i % n
		if policy == PolicyPrefix {
			to = s.assign(req)
		}
		parts[to].Requests = append(parts[to].Requests, req)
	}
	return parts, nil
}

// splitter tracks the requests assigned to each engine so far.
type splitter struct {
	given  []map[uint64]struct{} // ids, by engine
	tokens []int                 // by engine
}

func newSplitter(n int) *splitter {
	s := &splitter{given: make([]map[uint64]struct{}, n), tokens: make([]int, n)}
	for i := range s.given {
		s.given[i] = make(map[uint64]struct{})
	}
	return s
}

// assign returns the engine of the next request.
func (s *splitter) assign(req TraceRequest) int {
	least := 0
	for i := range s.tokens {
		if s.tokens[i] < s.tokens[least] {
			least = i
		}
	}
	best, longest := least, s.prefix(least, req)
	for i := range s.tokens {
		if s.tokens[i] > s.tokens[least]+s.tokens[least]/20+65_536 {
			continue
		}
		n := s.prefix(i, req)
		if n > longest || n == longest && s.tokens[i] < s.tokens[best] {
			best, longest = i, n
		}
	}
	s.tokens[best] += req.Input
	for _, id := range req.IDs {
		s.given[best][id] = struct{}{}
	}
	return best
}

// prefix returns how many of the first ids of a request an engine was assigned before.
func (s *splitter) prefix(engine int, req TraceRequest) int {
	for i, id := range req.IDs {
		if _, ok := s.given[engine][id]; !ok {
			return i
		}
	}
	return len(req.IDs)
}
