package truth

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// promptsPerRequest is the number of prompts of a request.
const promptsPerRequest = 4

// callTimeout is how long a call may take. A server that is paused answers none.
const callTimeout = 10 * time.Second

// Prober asks a server for prompts, and has the answers checked.
type Prober struct {
	Checker *Checker
	Client  kvcastv1.RouterEventServiceClient
	// Seed is the seed of the prompts.
	Seed uint64
	// Interval is the time between two requests.
	Interval time.Duration
	// Bounds returns how old the answer to the next request may be; nil: it may be of any age.
	Bounds func() Bounds
}

// Run asks until the context ends. It returns an error if an answer is wrong, or if a call fails for another reason than that the
// server is not there.
func (p *Prober) Run(ctx context.Context) error {
	rng := rand.New(rand.NewPCG(p.Seed, 5))
	pace := time.NewTicker(p.Interval)
	defer pace.Stop()
	for {
		select {
		case <-pace.C:
		case <-ctx.Done():
			return nil
		}
		if err := p.ask(ctx, rng); err != nil && ctx.Err() == nil {
			return fmt.Errorf("match prompts: %w", err)
		}
	}
}

func (p *Prober) ask(ctx context.Context, rng *rand.Rand) error {
	var bounds Bounds
	if p.Bounds != nil {
		bounds = p.Bounds()
	}
	q, ok := p.Checker.Draw(rng, promptsPerRequest, bounds)
	if !ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	answer, err := p.Client.MatchPrefix(ctx, q.Request)
	switch status.Code(err) {
	case codes.OK:
		return p.Checker.Check(q, answer)
	case codes.Unavailable, codes.DeadlineExceeded, codes.ResourceExhausted:
		p.Checker.failed()
		return nil
	default:
		return err
	}
}
