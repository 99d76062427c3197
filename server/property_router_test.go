package server_test

import (
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

// machineRouter is a router with one stream after another.
type machineRouter struct {
	checker *checker.Checker
	req     *kvcastv1.SubscribeRequest // request of the first stream
	stream  *subscription              // nil: disconnected
}

func (m *machine) filter(n int) *kvcastv1.Filter {
	return []*kvcastv1.Filter{
		nil, nil,
		{Workers: []string{"w1", "absent"}},
		{Models: []string{"m0"}},
		{Tiers: []kvcastv1.Tier{kvcastv1.Tier_TIER_DEVICE, kvcastv1.Tier_TIER_DISK}},
		{Workers: []string{"w0", "w1"}, Models: []string{"m1"}, Tiers: []kvcastv1.Tier{kvcastv1.Tier_TIER_EXTERNAL}},
	}[n%6]
}

func (m *machine) subscribe(s step) error {
	if len(m.routers) == 5 {
		return nil
	}
	req := []*kvcastv1.SubscribeRequest{fromSnapshot(nil), earliest(), latest()}[s.a%3]
	req.Filter = m.filter(s.b)
	if s.c%2 == 0 {
		orFail(req)
	}
	r := &machineRouter{checker: checker.New(checker.Options{}), req: digested(req)}
	m.routers = append(m.routers, r)
	r.stream = m.h.subscribe(r.checker, req)
	return nil
}

func (m *machine) doRouter(r *machineRouter, s step) error {
	switch s.what {
	case "kill":
		r.leave()
	case "resume":
		return m.resume(r)
	case "read":
		for range 1 + s.b%20 {
			if err := r.read(); err != nil {
				return err
			}
		}
	case "catch up":
		return m.catchUp(r)
	}
	return nil
}

func (r *machineRouter) leave() {
	if r.stream != nil {
		r.stream.cancel()
		r.stream = nil
	}
}

// resume starts a stream after the router's position, or with a snapshot without a position.
func (m *machine) resume(r *machineRouter) error {
	if r.stream != nil {
		return nil
	}
	req := fromSnapshot(nil)
	if p := r.checker.Position(); p != nil {
		req = after(p)
	}
	req.Filter, req.GapPolicy = r.req.GetFilter(), r.req.GetGapPolicy()
	r.stream = m.h.subscribe(r.checker, digested(req))
	return nil
}

// read receives a message. If the stream ends with an error that the contract allows, the router is disconnected. If
// its position is lost, its next stream may start with a snapshot.
func (r *machineRouter) read() error {
	if r.stream == nil {
		return nil
	}
	_, err := r.stream.next()
	if err == nil {
		return nil
	}
	r.leave()
	if bad := r.checker.Err(); bad != nil {
		return bad
	}
	code := status.Code(errors.Unwrap(err))
	if code == codes.Unavailable || code == codes.ResourceExhausted {
		return nil
	}
	positionLost := code == codes.OutOfRange || code == codes.FailedPrecondition
	if positionLost && r.req.GetGapPolicy() == kvcastv1.GapPolicy_GAP_POLICY_FAIL {
		r.req.GapPolicy = kvcastv1.GapPolicy_GAP_POLICY_SNAPSHOT
		return nil
	}
	return err
}

// catchUp reads until the view was compared with digests at the newest entry.
func (m *machine) catchUp(r *machineRouter) error {
	newest := m.h.Journal.Bounds()
	for range 100_000 {
		if err := m.resume(r); err != nil {
			return err
		}
		before := r.checker.Compared()
		if err := r.read(); err != nil {
			return err
		}
		p := r.checker.Position()
		if p.GetEpoch() == newest.Epoch && p.GetSeq() >= newest.Newest && (r.checker.Compared() > before || !m.expectsDigests(r)) {
			return nil
		}
	}
	return fmt.Errorf("router with request %v: position %v, bounds %+v, %d digests compared", r.req, r.checker.Position(), newest, r.checker.Compared())
}

// expectsDigests reports whether the router receives digests that it can compare: the filter selects a worker, and the
// router has received the worker's whole state.
func (m *machine) expectsDigests(r *machineRouter) bool {
	if r.req.GetLatest() != nil || r.req.GetEarliest() != nil {
		return false // the router may lack earlier blocks
	}
	workers, _ := m.h.Follower.Index().Workers(func(worker, model string) bool {
		f := r.req.GetFilter()
		return among(f.GetWorkers(), worker) && among(f.GetModels(), model)
	})
	return len(workers) > 0
}

func among(names []string, name string) bool {
	for _, n := range names {
		if n == name {
			return true
		}
	}
	return len(names) == 0
}
