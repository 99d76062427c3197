package client

import (
	"context"
	"time"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Routed is a prompt that was sent to a dp rank, which is expected to store its whole blocks soon.
type Routed struct {
	// Worker and Rank are where the prompt is computed.
	Worker string
	Rank   uint32
	// Prompt is the prompt, by Tokens or TokensHashes. Its model is that of the worker.
	Prompt Prompt
	// TTL is how long the blocks are expected, unless the engine's events tell before that they are stored: at most a minute; 0: 2 s.
	TTL time.Duration
}

func (r *Routed) proto() *kvcastv1.RoutedPrompt {
	return &kvcastv1.RoutedPrompt{Worker: r.Worker, DpRank: r.Rank, Prompt: r.Prompt.proto(), TtlNano: uint64(max(r.TTL, 0))}
}

// maxRouted is the number of prompts of a call.
const maxRouted = 64

// NoteRouted tells the server where prompts were sent. Until the engine reports that their blocks are stored, the server's matches say that they are
// expected (Match.Expected), so that requests with the same prefix can go to the same engine. The server ignores prompts for workers and ranks that it does
// not know, and more than it can remember. Other servers do not get them. Errors of the server are an *Error.
func (c *Client) NoteRouted(ctx context.Context, all ...Routed) (ignored int, err error) {
	for len(all) > 0 {
		req := new(kvcastv1.NoteRoutedRequest)
		for i := range all[:min(len(all), maxRouted)] {
			req.Routed = append(req.Routed, all[i].proto())
		}
		all = all[len(req.GetRouted()):]
		err := c.call(func(conn connection) error {
			res, err := kvcastv1.NewRouterEventServiceClient(conn).NoteRouted(ctx, req)
			ignored += int(res.GetIgnored())
			return err
		})
		if err != nil {
			return ignored, err
		}
	}
	return ignored, nil
}
