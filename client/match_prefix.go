package client

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// MatchRequest asks a server which dp ranks hold prefixes of prompts.
type MatchRequest struct {
	// Prompts are 1 to 64 prompts, all with the same Model.
	Prompts []Prompt
	// Workers are the names of the workers to match; empty: all.
	Workers []string
	// Limit is the maximum number of matches for each prompt; 0: all.
	Limit int
	// After is the position that the answer must include: the server waits until it has applied it. Zero: none.
	After Position
	// BlockHashes is the maximum number of Match.BlockHashes of each match; 0: none. A server refuses it unless it keeps them (retain_block_hashes).
	BlockHashes int
	// MaxWait is the longest time to wait for After, at most 10 s; 0: 1 s.
	MaxWait time.Duration
}

// MatchResult is a server's answer to a MatchRequest.
type MatchResult struct {
	// Position is the position at which the answer is exact.
	Position Position
	// Matches has the matches of each prompt of the request: what View.Match returns at the position, except that
	// the server also knows which sources have no connection (Match.Down), and where prompts were routed: Match.Expected orders
	// matches in place of Match.Blocks if it is set, and a rank may hold no block.
	Matches [][]Match
}

// MatchPrefix returns the dp ranks that hold prefixes of prompts, according to the server. Errors of the server are
// an *Error. A client of New opens a connection for the call, and tries each of several servers until one is available;
// use a Matcher for more than a few requests.
func (c *Client) MatchPrefix(ctx context.Context, req MatchRequest) (MatchResult, error) {
	m, err := req.proto()
	if err != nil {
		return MatchResult{}, err
	}
	var result MatchResult
	err = c.call(func(conn connection) error {
		res, err := kvcastv1.NewRouterEventServiceClient(conn).MatchPrefix(ctx, m)
		if err == nil {
			result = newMatchResult(m, res)
		}
		return err
	})
	return result, err
}

// call makes a call over a connection for it. It tries each server until one is available.
func (c *Client) call(do func(connection) error) error {
	for attempt := 1; ; attempt++ {
		conn, err := c.connect()
		if err != nil {
			return err
		}
		err = do(conn)
		conn.close()
		if err == nil {
			return nil
		}
		failure := newError(err)
		if failure.Code != codes.Unavailable {
			return failure
		}
		if conn.failed(); attempt == c.servers() {
			return failure
		}
	}
}

// proto returns the request as a message, or a *ConfigError.
func (r *MatchRequest) proto() (*kvcastv1.MatchPrefixRequest, error) {
	out := &kvcastv1.MatchPrefixRequest{Workers: r.Workers, Limit: uint32(max(r.Limit, 0)), MaxBlockHashes: uint32(max(r.BlockHashes, 0)), MaxWaitNano: uint64(max(r.MaxWait, 0))}
	if !r.After.IsZero() {
		out.After = r.After.Proto()
	}
	for i, p := range r.Prompts {
		if i == 0 {
			out.Model = p.Model
		}
		if p.Model != out.GetModel() {
			return nil, &ConfigError{fmt.Sprintf("Prompts[%d].Model", i), fmt.Sprintf("is %q: want %q, the model of the first prompt", p.Model, out.GetModel())}
		}
		out.Prompts = append(out.Prompts, p.proto())
	}
	return out, nil
}

func (p *Prompt) proto() *kvcastv1.Prompt {
	switch {
	case p.TokensHashes != nil:
		return &kvcastv1.Prompt{TokensHashes: p.TokensHashes, BlockSize: uint32(p.BlockSize)}
	case p.BlockHashes != nil:
		return &kvcastv1.Prompt{BlockHashes: p.BlockHashes, BlockSize: uint32(p.BlockSize)}
	}
	return &kvcastv1.Prompt{
		TokenIds: p.Tokens, LoraName: p.LoRA, CacheSalt: p.Salt, Eagle: p.Eagle, BlockSize: uint32(p.BlockSize), ExcludeLastToken: p.ExcludeLastToken,
	}
}

func newMatchResult(req *kvcastv1.MatchPrefixRequest, res *kvcastv1.MatchPrefixResponse) MatchResult {
	out := MatchResult{Position: Position{Epoch: res.GetPosition().GetEpoch(), Seq: res.GetPosition().GetSeq()}}
	for _, prompt := range res.GetPrompts() {
		var matches []Match
		for _, m := range prompt.GetMatches() {
			matches = append(matches, newMatch(req.GetModel(), m))
		}
		out.Matches = append(out.Matches, matches)
	}
	return out
}

func newMatch(model string, p *kvcastv1.PrefixMatch) Match {
	m := Match{
		Worker: p.GetWorker(), Model: model, Endpoint: p.GetEndpoint(), Rank: p.GetDpRank(),
		Blocks: int(p.GetBlocks()), Expected: int(p.GetExpectedBlocks()), ExpectedTokens: int(p.GetExpectedTokens()), Tokens: int(p.GetTokens()),
		BlockHashes: p.GetBlockHashes(), FetchEndpoint: p.GetFetchEndpoint(),
		Trust: p.GetTrust(), Reasons: p.GetReasons(), Down: time.Duration(p.GetDownNano()), Age: time.Duration(p.GetAgeNano()),
	}
	if model == "" {
		m.Model = p.GetModel()
	}
	for tier := range numTiers {
		m.TierTrust[tier+1] = m.Trust
	}
	for _, t := range p.GetTiers() {
		tier := uint32(t.GetTier())
		if tier > numTiers {
			continue // of a later version
		}
		m.TierBlocks[tier], m.TierTokens[tier] = int(t.GetBlocks()), int(t.GetTokens())
		if t.GetTrust() != kvcastv1.Trust_TRUST_UNSPECIFIED {
			m.TierTrust[tier] = t.GetTrust()
		}
		if t.EndedByGroup != nil {
			m.TierEndedBy[tier] = OptionalGroup{Index: t.GetEndedByGroup(), Set: true}
		}
	}
	for _, pool := range p.GetPools() {
		m.Pools = append(m.Pools, PoolPrefix{
			Pool: pool.GetPool(), Tokens: int(pool.GetTokens()), Blocks: int(pool.GetBlocks()), Trust: pool.GetTrust(), Reasons: pool.GetReasons(),
		})
	}
	return m
}
