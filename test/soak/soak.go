package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvcast/kvcast/test/truth"
)

const (
	// warmUp is the share of the checks after which memory must be flat.
	warmUp = 0.25
	// rssFactor and rssMore bound the growth of the server's memory after the warm-up.
	rssFactor, rssMore = 1.25, 32 << 20
	// minMemoryChecks is the number of checks below which the growth of memory is not checked.
	minMemoryChecks = 4
	// maxFailures is the number of failures that ends a soak early.
	maxFailures = 3
	// journalBytes is small, so that the journal is full when the warm-up ends, and evicts entries
	// before the slow subscriber has read them.
	journalBytes = "4MiB"
)

// soakRun is a soak in progress.
type soakRun struct {
	config
	out          io.Writer
	began        time.Time
	fleet        *fleet
	server       *server
	routers      []*router
	routerErrors chan error // errors that ended a router, the matcher or the prober
	matcher      *matcher

	baselineAlone, baselineRouters usage // before the routers subscribe, and at the first check
	rss                            []int64
	repairs                        map[string]float64 // by worker, at the last check
	repaired                       float64
	checks                         int
	equal, incomplete              int // ranks, over all checks
	failures                       []error
}

// soak runs a soak. The error contains every check that failed.
func soak(ctx context.Context, c config, out io.Writer) (err error) {
	s := &soakRun{config: c, out: out, routerErrors: make(chan error, 16), repairs: make(map[string]float64)}
	s.logf("soak for %v: %d engines, %v batches a second each, seed %d", c.total, c.engines, c.rate, c.seed)
	if s.fleet, err = newFleet(ctx, c); err != nil {
		return fmt.Errorf("start engines: %w", err)
	}
	defer func() { err = errors.Join(err, s.fleet.stop()) }()
	flags := slices.Concat(s.fleet.flags, []string{"--ingest-silence", "2s", "--ingest-grace", "5s",
		"--subscribers-progress", "1s", "--journal-max-bytes", journalBytes})
	if c.transport != "" {
		flags = append(flags, "--ingest-listen-transport", c.transport, "--ingest-connect-transport", c.transport)
	}
	s.server, err = startServer(c.race, flags...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.server.Stop()) }()
	s.began = time.Now()
	if err := s.run(ctx); err != nil {
		return err
	}
	s.fail("end", errors.Join(s.server.Stop(), s.server.logFaults()))
	s.summarise()
	if err := errors.Join(s.failures...); err != nil {
		return fmt.Errorf("%d checks failed:\n%w\nthe end of the server's log:\n%s", len(s.failures), err, s.server.logEnd())
	}
	return nil
}

func (s *soakRun) logf(format string, args ...any) { _, _ = fmt.Fprintf(s.out, format+"\n", args...) }

// fail records the failure of a check unless err is nil.
func (s *soakRun) fail(check string, err error) {
	if err == nil {
		return
	}
	err = fmt.Errorf("%s: %w", check, err)
	s.failures = append(s.failures, err)
	s.logf("FAILED %v", err)
}

// run runs the soak between two measurements of a server without subscribers. It returns an error
// if the soak cannot continue.
func (s *soakRun) run(ctx context.Context) error {
	if _, err := s.fleet.pause(ctx, s.waitTimeout); err != nil {
		return fmt.Errorf("pause engines: %w", err)
	}
	var err error
	if s.baselineAlone, err = s.server.usage(ctx); err != nil {
		return err
	}
	following, stop := context.WithCancel(ctx)
	var all sync.WaitGroup
	defer all.Wait()
	defer stop()
	for i, t := range s.behaviors() {
		r, err := newRouter(s.server.addr, t, s.seed+uint64(i))
		if err != nil {
			return err
		}
		if i == 0 {
			r.truth = s.fleet.truth
		}
		s.routers = append(s.routers, r)
		all.Go(func() {
			if err := r.run(following); err != nil {
				s.routerErrors <- err
			}
		})
	}
	s.matcher = &matcher{router: s.routers[0], rng: rand.New(rand.NewPCG(s.seed, 3))}
	all.Go(func() {
		if err := s.matcher.run(following); err != nil {
			s.routerErrors <- err
		}
	})
	prober := truth.Prober{
		Checker: s.fleet.truth, Client: s.routers[0].client, Seed: s.seed, Interval: matchInterval, Bounds: s.routers[0].bounds,
	}
	all.Go(func() {
		if err := prober.Run(following); err != nil {
			s.routerErrors <- err
		}
	})
	for end := s.began.Add(s.total); ; {
		if err := s.check(ctx); err != nil {
			return err
		}
		if !time.Now().Before(end) || len(s.failures) >= maxFailures {
			break
		}
		s.fleet.resume()
		select {
		case err := <-s.routerErrors:
			s.fail("checker", err)
			return s.stopRouters(ctx, stop, &all)
		case <-time.After(min(s.every, time.Until(end))):
		case <-ctx.Done():
			return errors.New("interrupted")
		}
	}
	return s.stopRouters(ctx, stop, &all)
}

// stopRouters stops the routers, and waits until the server's usage is back at the baseline without them.
func (s *soakRun) stopRouters(ctx context.Context, stop func(), all *sync.WaitGroup) error {
	stop()
	all.Wait()
	for _, r := range s.routers {
		if err := r.conn.Close(); err != nil {
			return err
		}
	}
	if _, err := s.fleet.pause(ctx, s.waitTimeout); err != nil {
		s.fail("pause", err)
		return nil
	}
	return s.waitForBaseline(ctx, "left behind", s.baselineAlone)
}

// behaviors returns the behaviors of the subscribers: steady, reconnecting, slow, and filtered.
func (s *soakRun) behaviors() []behavior {
	var half []string
	for i, e := range s.fleet.engines {
		if i%2 == 0 && e.rank == 0 {
			half = append(half, e.worker)
		}
	}
	return []behavior{
		{name: "steady"},
		{name: "reconnecting", maxStream: 3 * time.Second},
		{name: "slow", delay: 100 * time.Millisecond},
		{name: "filtered and reconnecting", maxStream: 10 * time.Second, workers: half},
	}
}

// check pauses the engines and compares everything. The engines are still paused when it returns.
// It returns an error if the soak cannot continue.
func (s *soakRun) check(ctx context.Context) error {
	began := time.Now()
	for _, r := range s.routers {
		r.uninterrupted.Store(true)
		defer r.uninterrupted.Store(false)
	}
	states, err := s.fleet.pause(ctx, s.waitTimeout)
	if ctx.Err() != nil {
		return errors.New("interrupted")
	}
	if err != nil {
		s.fail("pause", err)
		return nil
	}
	o := s.converge(ctx, states)
	if s.checks++; s.checks == 1 {
		s.baselineRouters, err = s.server.usage(ctx)
	} else {
		err = s.waitForBaseline(ctx, "leak", s.baselineRouters)
	}
	if err != nil {
		return err
	}
	u, err := s.server.usage(ctx)
	if err != nil {
		return err
	}
	s.rss = append(s.rss, u.rss)
	if err := s.countRepairs(ctx); err != nil {
		return err
	}
	s.equal, s.incomplete = s.equal+o.equal, s.incomplete+o.incomplete
	sum, steady := s.fleet.summary(), s.routers[0].totals()
	s.logf("%4.0fs  batches %d, events %d, faults %d, repairs %.0f, gaps reported %d, restarts reported %d | ranks equal %d, incomplete %d (%d differ) after %.1fs | %v",
		time.Since(s.began).Seconds(), sum.Batches, sum.Events, total(sum.Faults), s.repaired, steady.gaps, steady.restarts,
		o.equal, o.incomplete, o.differ, time.Since(began).Seconds(), u)
	s.fail("log", s.server.logFaults())
	return nil
}

// converge waits until every view equals the engines, and returns the outcome of the steady router.
func (s *soakRun) converge(ctx context.Context, states []state) (steady outcome) {
	ctx, cancel := context.WithTimeout(ctx, s.waitTimeout)
	defer cancel()
	outcomes, errs := make([]outcome, len(s.routers)), make([]error, len(s.routers))
	var all sync.WaitGroup
	for i, r := range s.routers {
		all.Go(func() { outcomes[i], errs[i] = r.await(ctx, states) })
	}
	all.Wait()
	select {
	case err := <-s.routerErrors:
		s.fail("checker", err)
	default:
	}
	err := errors.Join(errs...)
	s.fail("convergent", err)
	if err == nil {
		s.fail("convergent", s.awaitSnapshot(ctx, states))
	}
	if needless := outcomes[0].falselyIncomplete; len(needless) > 0 {
		s.fail("complete", fmt.Errorf("reported incomplete, though every batch was available for replay: %s", strings.Join(needless, "; ")))
	}
	return outcomes[0]
}

// awaitSnapshot waits until a snapshot equals the engines. A rank that was incomplete when the views were compared may be repaired later: the server
// then clears it, and replays its batches.
func (s *soakRun) awaitSnapshot(ctx context.Context, states []state) error {
	ticker := time.NewTicker(200 * time.Millisecond)
	defer ticker.Stop()
	for {
		err := s.routers[0].snapshot(ctx, states)
		if err == nil {
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return err
		}
	}
}

// waitForBaseline waits until the server's usage is back at a baseline.
func (s *soakRun) waitForBaseline(ctx context.Context, check string, baseline usage) error {
	ticker := time.NewTicker(200 * time.Millisecond)
	defer ticker.Stop()
	for deadline := time.Now().Add(s.waitTimeout); ; {
		u, err := s.server.usage(ctx)
		if err != nil {
			return err
		}
		if u.goroutines <= baseline.goroutines && u.descriptors <= baseline.descriptors && u.sockets <= baseline.sockets {
			return nil
		}
		if time.Now().After(deadline) {
			s.fail(check, fmt.Errorf("%v, at first %v", u, baseline))
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return errors.New("interrupted")
		}
	}
}

// countRepairs adds the repairs since the last call. The count of a removed worker restarts at
// zero.
func (s *soakRun) countRepairs(ctx context.Context) error {
	now, err := s.server.repairs(ctx)
	if err != nil {
		return err
	}
	for worker, n := range now {
		if before := s.repairs[worker]; n >= before {
			n -= before
		}
		s.repaired += n
	}
	s.repairs = now
	return nil
}

// checkMemory returns an error if the server's memory exceeded its bound after the warm-up.
func checkMemory(rss []int64) error {
	if len(rss) < minMemoryChecks {
		return nil
	}
	first := max(1, int(float64(len(rss))*warmUp))
	bound := int64(float64(rss[first])*rssFactor) + rssMore
	for i, n := range rss[first:] {
		if n > bound {
			return fmt.Errorf("rss %d MiB at check %d, and %d MiB at check %d, the first after the warm-up: want at most %d MiB",
				n>>20, first+i, rss[first]>>20, first, bound>>20)
		}
	}
	return nil
}
