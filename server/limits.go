package server

import (
	"context"
	"math"
	"math/rand/v2"
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc/keepalive"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/server/internal/admission"
)

// Limits of queries: unary calls that read all workers of the index, which delays new entries. A lookup by
// tokens hash reads every block of every worker that the filter selects, so only one runs at a time.
const (
	maxTokensLookups  = 1
	maxBlockLookups   = 4
	maxWorkersQueries = 2 // ListWorkers and GetStatus together
	maxInspections    = 2 // ListIncidents, ListEntries and GetChain together
	maxSharingScans   = 1 // of ListSharedPrefixes, which read every block
	maxQueriesWaiting = 64

	// The memory of the requests bounds how many matches wait.
	maxMatchesWaiting = math.MaxInt32
)

// maxMatches is how many matches run at a time, of which an address has at most half. A match uses one core, and waits for nothing but entries that are being
// applied: more would take more memory for matches, and let the core of one address's match wait for those of another.
func maxMatches() int { return max(4, 2*runtime.GOMAXPROCS(0)) }

// queries limits the queries of each kind.
type queries struct {
	tokensLookups, blockLookups *admission.Queries
	workers                     *admission.Queries
	matches                     *admission.Queries // requests of MatchPrefix and MatchPrefixes that are matched
	inspections                 *admission.Queries
	sharingScans                *admission.Queries
}

func newQueries(all promauto.Factory) queries {
	return queries{
		tokensLookups: admission.NewQueries(all, "tokens_lookup", maxTokensLookups, maxTokensLookups, maxQueriesWaiting),
		blockLookups:  admission.NewQueries(all, "block_lookup", maxBlockLookups, maxBlockLookups, maxQueriesWaiting),
		workers:       admission.NewQueries(all, "workers", maxWorkersQueries, maxWorkersQueries, maxQueriesWaiting),
		matches:       admission.NewQueries(all, "match", maxMatches(), maxMatches()/2, maxMatchesWaiting),
		inspections:   admission.NewQueries(all, "inspection", maxInspections, maxInspections, maxQueriesWaiting),
		sharingScans:  admission.NewQueries(all, "shared_prefixes", maxSharingScans, maxSharingScans, maxQueriesWaiting),
	}
}

// Limits of streams by address and in all. A tool opens a reflection stream for less than a second.
const (
	maxReflections            = 64
	maxReflectionsPerAddress  = 16
	maxMatchStreams           = 256
	maxMatchStreamsPerAddress = 128
)

// maxMatchRequest is the memory of the largest request of MatchPrefix, approximately: its token ids take a byte each.
const maxMatchRequest = 9 * maxRequestBytes

// quotas bound the streams that no limiter of subscribers bounds, and the memory of requests.
type quotas struct {
	watches, reflections, matchStreams *admission.Quota
	subscribers, replays               *admission.Quota
	filterBytes                        *admission.Bytes
	matchBytes                         *admission.Bytes // of requests of MatchPrefix and MatchPrefixes in progress
}

func newQuotas(all promauto.Factory, cfg *Config) quotas {
	return quotas{
		watches:      admission.NewQuota(all, "health_watches", cfg.MaxConnections, cfg.MaxConnectionsPerAddress),
		reflections:  admission.NewQuota(all, "reflection_streams", maxReflections, maxReflectionsPerAddress),
		matchStreams: admission.NewQuota(all, "match_streams", maxMatchStreams, maxMatchStreamsPerAddress),
		// A proxy may pass on all streams of its clients over one connection.
		subscribers: admission.NewQuota(all, "subscribers", cfg.MaxSubscribers, cfg.MaxConnectionsPerAddress),
		replays:     admission.NewQuota(all, "replays", cfg.MaxSubscribers, cfg.MaxConnectionsPerAddress),
		filterBytes: admission.NewBytes("filter_bytes", cfg.MaxFilterBytes, MinFilterBytes),
		matchBytes:  admission.NewBytes("match_bytes", cfg.MaxMatchBytes, maxMatchRequest),
	}
}

func (q *quotas) budgets() []*budget.Budget {
	return []*budget.Budget{q.watches.Total(), q.reflections.Total(), q.matchStreams.Total(), q.subscribers.Total(), q.replays.Total(), q.filterBytes.Total(), q.matchBytes.Total()}
}

// Clients reconnect at MaxConnectionAge, so that a load balancer can move them to other servers. gRPC sends
// GOAWAY at that age and closes the connection after a grace time, which calls see as a network failure. The
// server ends Subscribe streams between the two, with a reason. Measured from the accept:
//
//	0.9 to 1.1 age                GOAWAY: new calls use another connection
//	1.1 age + 0.25 to 1 grace     Subscribe streams end, at random times
//	at least 1 grace later        gRPC closes the connection
//
// A stream must not end before the GOAWAY, or its client resumes over the same connection. gRPC measures the
// age from the end of the handshake; a quarter of the grace time covers the difference.

func (s *Server) keepaliveParams() keepalive.ServerParameters {
	p := keepalive.ServerParameters{Time: keepaliveTime, Timeout: keepaliveTimeout}
	if age := s.cfg.MaxConnectionAge; age > 0 {
		p.MaxConnectionAge = age
		p.MaxConnectionAgeGrace = age/5 + 2*s.cfg.MaxConnectionAgeGrace // from the GOAWAY, which may be at 0.9 age
	}
	return p
}

// connectionAgeTimer returns a timer that fires when a Subscribe stream must end; nil: no limit.
func (s *Server) connectionAgeTimer(ctx context.Context) *time.Timer {
	age, grace := s.cfg.MaxConnectionAge, s.cfg.MaxConnectionAgeGrace
	if age == 0 {
		return nil
	}
	end := admission.Opened(ctx).Add(age + age/10 + grace/4 + rand.N(grace*3/4+1))
	return time.NewTimer(time.Until(end))
}
