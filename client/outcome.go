package client

import (
	"context"
	"log/slog"
	"sync"
	"time"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Outcome is what an engine has reused of a prompt, and what was predicted. Servers count how often predictions are right, and
// degrade a rank whose predictions are too long again and again.
type Outcome struct {
	// Worker and Rank are where the prompt was computed.
	Worker string
	Rank   uint32
	// Position is that of the prediction: MatchResult.Position, or what View.Status returned before View.Match.
	Position Position
	// Predicted is the number of tokens that the engine was predicted to reuse, and Reused the number that it has reused, as in
	// usage.prompt_tokens_details.cached_tokens. Negative numbers count as 0.
	Predicted, Reused int
	// Trust is that of the prediction. TRUST_UNSPECIFIED: the rank's trust when the server gets the report.
	Trust kvcastv1.Trust
}

// Outcome returns the outcome of a match of a prompt without its last token, which engines compute always. The prediction is that
// the engine reuses what its device memory holds.
func (m *Match) Outcome(at Position, reused int) Outcome {
	o := Outcome{Worker: m.Worker, Rank: m.Rank, Position: at, Reused: reused, Trust: m.TierTrust[kvcastv1.Tier_TIER_DEVICE]}
	if m.Blocks > 0 {
		o.Predicted = m.TierBlocks[kvcastv1.Tier_TIER_DEVICE] * (m.Tokens / m.Blocks)
	}
	return o
}

func (o *Outcome) proto() *kvcastv1.Outcome {
	return &kvcastv1.Outcome{
		Worker: o.Worker, DpRank: o.Rank, Position: o.Position.Proto(),
		PredictedTokens: uint64(max(o.Predicted, 0)), CachedTokens: uint64(max(o.Reused, 0)), Trust: o.Trust,
	}
}

const (
	maxReported   = 1_000  // outcomes of a call
	maxUnreported = 10_000 // outcomes that wait for one
	// reportInterval is the time from the first outcome until it is sent, with those that have come since.
	reportInterval = time.Second
	// reportTimeout bounds a call, and so Reporter.Close.
	reportTimeout = 5 * time.Second
	// logInterval is the time between two log lines.
	logInterval = 10 * time.Second
)

// ReportOutcomes reports outcomes to the server, which ignores those of workers, ranks and positions that it does not know. Errors
// of the server are an *Error. A Reporter collects outcomes, and so needs few calls.
func (c *Client) ReportOutcomes(ctx context.Context, all ...Outcome) (ignored int, err error) {
	for len(all) > 0 {
		n := min(len(all), maxReported)
		req := &kvcastv1.ReportOutcomeRequest{Outcomes: make([]*kvcastv1.Outcome, n)}
		for i := range req.GetOutcomes() {
			req.Outcomes[i] = all[i].proto()
		}
		all = all[n:]
		err := c.call(func(conn connection) error {
			res, err := kvcastv1.NewRouterEventServiceClient(conn).ReportOutcome(ctx, req)
			ignored += int(res.GetIgnored())
			return err
		})
		if err != nil {
			return ignored, err
		}
	}
	return ignored, nil
}

// Reporter reports outcomes to a server, about once a second. If it cannot, it drops them: they are statistics.
type Reporter struct {
	client *Client
	log    *slog.Logger
	added  chan struct{} // has an element if there are outcomes
	stop   chan struct{} // closed by Close
	done   chan struct{} // closed when run has returned
	close  func()        // closes stop, once

	mu      sync.Mutex // guards all below
	pending []Outcome
	dropped int       // since the last log line
	logged  time.Time // the last log line
}

// NewReporter returns a Reporter, which the caller must close. It logs what it drops; log may be nil.
func (c *Client) NewReporter(log *slog.Logger) *Reporter {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	stop := make(chan struct{})
	r := &Reporter{
		client: c, log: log, added: make(chan struct{}, 1), stop: stop, done: make(chan struct{}),
		close: sync.OnceFunc(func() { close(stop) }),
	}
	go r.run()
	return r
}

// Report adds an outcome, and does not block. It is safe for concurrent use.
func (r *Reporter) Report(o Outcome) {
	r.mu.Lock()
	if len(r.pending) < maxUnreported {
		r.pending = append(r.pending, o)
	} else {
		r.dropped++
	}
	r.mu.Unlock()
	select {
	case r.added <- struct{}{}:
	default:
	}
}

// Close reports the outcomes that are left, within 5 s, and ends the Reporter.
func (r *Reporter) Close() {
	r.close()
	<-r.done
}

// run reports outcomes until Close.
func (r *Reporter) run() {
	defer close(r.done)
	for {
		select {
		case <-r.added:
		case <-r.stop:
			r.send()
			return
		}
		timer := time.NewTimer(reportInterval)
		select {
		case <-timer.C:
		case <-r.stop:
			timer.Stop()
		}
		r.send()
	}
}

// send reports the outcomes that are pending.
func (r *Reporter) send() {
	r.mu.Lock()
	all := r.pending
	r.pending = nil
	r.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), reportTimeout)
	defer cancel()
	ignored, err := r.client.ReportOutcomes(ctx, all...)
	if err == nil {
		r.log.Debug("outcomes reported", "outcomes", len(all), "ignored", ignored)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dropped += len(all)
	if now := time.Now(); now.Sub(r.logged) >= logInterval {
		r.log.Warn("outcomes are not reported", "dropped", r.dropped, "error", err)
		r.dropped, r.logged = 0, now
	}
}
