package member

import (
	"context"
	"math/rand/v2"
	"net"
	"slices"
	"time"

	"github.com/kvcast/kvcast/ingest"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/cluster"
	"github.com/kvcast/kvcast/internal/transport/enginegrpc"
	"github.com/kvcast/kvcast/internal/transport/objects"
	"github.com/kvcast/kvcast/internal/zmtp/outbound"
)

const (
	// remembered is how many endpoints that have greeted are tried again first.
	remembered = 8
	// firstProbes and secondProbes are how many endpoints are tried. If none of the first greets, the second are tried, and
	// if none of these does, the instance reaches no engine.
	firstProbes, secondProbes = 16, 64
	// minProbeTime is the least time that endpoints have to greet.
	minProbeTime = time.Second
)

// sourceKey names a source of a worker.
type sourceKey struct {
	worker, endpoint string
	rank             uint32
}

// reach finds out whether this instance reaches the engines to which kvcast connects. A batch of any shows that it does.
// After TTL/3 without one, it tries some of their endpoints: a publisher greets whoever connects. A connection alone shows
// less: a proxy or a load balancer accepts it, too.
type reach struct {
	member  *Member
	seqs    map[sourceKey]uint64
	quiet   time.Time // since when neither a batch nor a greeting came
	failed  bool      // the first probes have failed
	greeted []string  // endpoints, the last one first
}

// watchEngines notifies the machine whether engines are reached, until ctx ends.
func (m *Member) watchEngines(ctx context.Context) {
	r := reach{member: m, quiet: time.Now()}
	ticker := time.NewTicker(m.cfg.TTL / 6)
	defer ticker.Stop()
	known := cluster.ReachUnknown
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		now := r.look(ctx, known)
		if now == known || ctx.Err() != nil {
			continue
		}
		switch {
		case now == cluster.ReachNone:
			m.cfg.Log.Warn("no engine is reached: the workers go to other servers, if these reach any")
		case known == cluster.ReachNone:
			m.cfg.Log.Info("engines are reached again")
		}
		known = now
		m.mu.Lock()
		m.engines = now
		m.machine.Engines(now)
		m.mu.Unlock()
		m.signal()
		m.putHeartbeat(ctx)
	}
}

// look returns whether engines are reached, or what was known before if it is too early to say.
func (r *reach) look(ctx context.Context, before cluster.Reach) cluster.Reach {
	now := time.Now()
	sources := r.member.parts.Ingest.Sources()
	r.member.mu.Lock()
	heard := r.heard(sources, r.member.claims.reading)
	wanted := r.wantedEndpoints()
	r.member.mu.Unlock()
	if heard {
		r.quiet, r.failed = now, false
		return cluster.ReachSome
	}
	if now.Sub(r.quiet) < r.member.cfg.TTL/3 {
		return before
	}
	if len(wanted) == 0 {
		r.failed = false
		return cluster.ReachUnknown
	}
	most := firstProbes
	if r.failed {
		most = secondProbes
	}
	if endpoint := greets(ctx, r.choose(wanted, most), max(r.member.cfg.TTL/3, minProbeTime)); endpoint != "" {
		r.remember(endpoint)
		r.quiet, r.failed = time.Now(), false
		return cluster.ReachSome
	}
	if !r.failed {
		r.failed = true
		return before
	}
	return cluster.ReachNone
}

// heard reports whether a batch of a worker to which this instance connects came since the last call. What was restored or
// has just begun does not count.
func (r *reach) heard(sources []ingest.SourceStatus, reading map[string]ingestconfig.Worker) bool {
	heard, before := false, r.seqs
	r.seqs = make(map[sourceKey]uint64)
	for _, s := range sources {
		if _, ok := reading[s.Worker]; !ok || !s.Started || leadsNowhere(s.Endpoint) {
			continue
		}
		key := sourceKey{s.Worker, s.Endpoint, s.Rank}
		last, ok := before[key]
		heard = heard || ok && last != s.LastSeq
		r.seqs[key] = s.LastSeq
	}
	return heard
}

// wantedEndpoints returns the endpoints to which kvcast connects, of one dp rank of each source. Member.mu must be held.
func (r *reach) wantedEndpoints() (all []string) {
	for name := range r.member.wanted {
		w, ok := r.member.worker(name)
		c := ingestconfig.Config{Workers: []ingestconfig.Worker{w}}
		if !ok || c.Validate() != nil { // another instance has announced it
			continue
		}
		for _, s := range c.WithDefaults().Workers[0].Sources {
			if ranks := s.Endpoints(); !leadsNowhere(s.Connect) {
				all = append(all, ranks[rand.IntN(len(ranks))].Connect)
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// leadsNowhere reports whether an endpoint is that of no server: what is read there shows no network.
func leadsNowhere(endpoint string) bool {
	e, _ := ingestconfig.ParseSource(endpoint)
	return e.Transport == ingestconfig.TransportWorkers
}

// choose returns at most a number of endpoints: those that have greeted, and others at random.
func (r *reach) choose(wanted []string, most int) (chosen []string) {
	for _, e := range r.greeted {
		if slices.Contains(wanted, e) {
			chosen = append(chosen, e)
		}
	}
	for _, i := range rand.Perm(len(wanted)) {
		if len(chosen) >= most {
			break
		}
		if !slices.Contains(chosen, wanted[i]) {
			chosen = append(chosen, wanted[i])
		}
	}
	return chosen
}

// remember makes an endpoint be tried first.
func (r *reach) remember(endpoint string) {
	r.greeted = slices.DeleteFunc(r.greeted, func(e string) bool { return e == endpoint })
	r.greeted = slices.Insert(r.greeted, 0, endpoint)
	r.greeted = r.greeted[:min(len(r.greeted), remembered)]
}

// greeting reports whether a publisher greets at an endpoint before ctx ends.
func greeting(ctx context.Context, endpoint string) bool {
	e, ok := ingestconfig.ParseSource(endpoint)
	if !ok {
		return false
	}
	network, address := e.Net()
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, network, address)
	if err != nil {
		return false
	}
	defer func() { _ = c.Close() }()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	switch {
	case e.Transport == ingestconfig.TransportLMCacheCoordinator, e.Transport == ingestconfig.TransportMooncake:
		return objects.ReadGreeting(ctx, c) == nil
	case e.Transport == ingestconfig.TransportLMCache:
		return enginegrpc.ReadLMCacheGreeting(c) == nil
	case e.Called():
		return enginegrpc.ReadGreeting(c) == nil
	default:
		return outbound.ReadGreeting(c) == nil
	}
}

// greets returns the first of the endpoints at which a publisher greets within the timeout; empty if none does.
func greets(ctx context.Context, endpoints []string, timeout time.Duration) (first string) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	greeted := make(chan string, len(endpoints))
	for _, endpoint := range endpoints {
		go func() {
			if !greeting(ctx, endpoint) {
				endpoint = ""
			}
			greeted <- endpoint
		}()
	}
	for range endpoints {
		if endpoint := <-greeted; endpoint != "" && first == "" {
			first = endpoint
			cancel() // the others end
		}
	}
	return first
}
