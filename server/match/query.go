// Package match converts between the messages of MatchPrefix and an index: requests to queries, and matches to
// encoded responses. It has no state but memory for reuse.
package match

import (
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"

	"github.com/kvcast/kvcast/internal/core/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Limits of a request. The server also limits its encoded size.
const (
	maxPrompts  = 64
	maxTokenIDs = 1 << 18 // of a prompt
	maxHashes   = 1 << 16 // of a prompt
	maxWorkers  = 10_000
	// MaxLookups bounds the lookups of blocks whose content is unknown, of all prompts by block hashes. The index takes no new entry
	// meanwhile: some milliseconds.
	MaxLookups  = 1 << 17
	maxWait     = 10 * time.Second
	defaultWait = time.Second
)

// Violation is an invalid field of a request.
type Violation = errdetails.BadRequest_FieldViolation

// Query is the query of a request, and its memory for reuse. The zero value is ready for use. Set or Decode sets it,
// and Check must accept it before it is used.
type Query struct {
	index.Query
	// After is the position that the answer must include; nil: none.
	After *kvcastv1.Position
	// Bytes estimates the memory of the request and its query.
	Bytes int64
	// Outcomes and Routed are those that come with the request. They are not checked by Check.
	Outcomes []*kvcastv1.Outcome
	Routed   []*kvcastv1.RoutedPrompt

	maxWaitNano uint64
	requested   bool  // there was a MatchPrefixRequest
	lists       lists // for Decode
	names       int   // workers in the request
	workers     map[string]struct{}
	selected    func(string) bool // reports whether a name is in workers
}

// Set sets the query to that of a request, whose memory it references until Clear. Of more prompts than are allowed, it keeps so
// many that Check refuses the query: a prompt takes many times the memory of its encoding.
func (q *Query) Set(req *kvcastv1.MatchPrefixRequest) {
	q.reset()
	q.After, q.maxWaitNano = req.GetAfter(), req.GetMaxWaitNano()
	q.Model, q.Limit, q.BlockHashes = req.GetModel(), int(req.GetLimit()), int(req.GetMaxBlockHashes())
	for _, p := range req.GetPrompts()[:min(len(req.GetPrompts()), maxPrompts+1)] {
		q.Prompts = append(q.Prompts, promptOf(p))
	}
	q.finish(req.GetWorkers())
}

// reset makes the query that of an empty request.
func (q *Query) reset() {
	q.Model, q.Limit, q.BlockHashes, q.After, q.maxWaitNano, q.requested = "", 0, 0, nil, 0, false
	q.Outcomes, q.Routed = q.Outcomes[:0], q.Routed[:0]
	q.Prompts = q.Prompts[:0]
	l := &q.lists
	q.lists = lists{l.tokenIDs[:0], l.tokensHashes[:0], l.blockHashes[:0], l.ends[:0], l.names[:0], l.model}
}

// Estimates of memory, in bytes: of a query without prompts and names, with the memory of its call, and of a name.
const (
	queryBytes = 16 << 10
	nameBytes  = 64
	// outcomeBytes is of an outcome with its position and a usual name.
	outcomeBytes = 256
)

// finish sets the fields that follow from the others.
func (q *Query) finish(names []string) {
	q.Bytes, q.MaxLookups = queryBytes, MaxLookups
	for i := range q.Prompts {
		p := &q.Prompts[i]
		q.Bytes += int64(8 * (len(p.TokenIDs) + len(p.TokensHashes) + len(p.BlockHashes)))
	}
	if q.BlockHashes > 0 { // of the answer, and its encoding
		q.Bytes += 16 * index.MaxBlockHashes
	}
	q.Bytes += int64(outcomeBytes*len(q.Outcomes)) + RoutedBytes(q.Routed)
	q.names, q.Worker = len(names), nil
	if len(names) == 0 {
		return
	}
	if q.workers == nil {
		q.workers = make(map[string]struct{}, len(names))
		q.selected = func(name string) bool { _, ok := q.workers[name]; return ok }
	}
	for _, name := range names {
		q.workers[name] = struct{}{}
		q.Bytes += int64(nameBytes + len(name))
	}
	q.Worker = q.selected
}

// IsLarge reports whether the memory of the query is not worth keeping for others.
func (q *Query) IsLarge() bool { return q.Bytes > maxReusedBytes }

// Clear makes the query reference no memory of its request, and little memory of its own.
func (q *Query) Clear() {
	q.After, q.Worker = nil, nil
	clear(q.Prompts)
	clear(q.workers)
	clear(q.lists.names)
	clear(q.Outcomes)
	clear(q.Routed)
	if q.IsLarge() {
		*q = Query{}
	}
}

// maxReusedBytes bounds the memory that a query keeps for reuse.
const maxReusedBytes = 256 << 10

// MaxWait returns the time to wait for the position After.
func (q *Query) MaxWait() time.Duration {
	if q.maxWaitNano == 0 {
		return defaultWait
	}
	return time.Duration(q.maxWaitNano)
}

// Asks reports whether there is a request, and not outcomes or routed prompts alone.
func (q *Query) Asks() bool { return q.requested || len(q.Outcomes)+len(q.Routed) == 0 }

// Check returns the invalid fields of the request.
func (q *Query) Check() (all []*Violation) {
	violate := func(field, format string, args ...any) {
		all = append(all, &Violation{Field: field, Description: fmt.Sprintf(format, args...)})
	}
	switch n := len(q.Prompts); {
	case n == 0:
		violate("prompts", "0 prompts are not allowed: want 1 to %d", maxPrompts)
	case n > maxPrompts:
		violate("prompts", "more than %d prompts are not allowed: want 1 to %d", maxPrompts, maxPrompts)
	}
	if q.names > maxWorkers {
		violate("workers", "%d names are too many: at most %d are allowed", q.names, maxWorkers)
	}
	if q.maxWaitNano > uint64(maxWait) {
		violate("max_wait_nano", "%d is not allowed: want at most %d (%v)", q.maxWaitNano, maxWait.Nanoseconds(), maxWait)
	}
	if n := q.BlockHashes; n > index.MaxBlockHashes {
		violate("max_block_hashes", "%d is not allowed: want at most %d", n, index.MaxBlockHashes)
	}
	for i := range q.Prompts {
		if why := invalidPrompt(&q.Prompts[i]); why != nil {
			violate(fmt.Sprintf("prompts[%d].%s", i, why.GetField()), "%s", why.GetDescription())
		}
	}
	return all
}

// invalidPrompt returns the first invalid field of a prompt; nil if the prompt is valid.
func invalidPrompt(p *index.Prompt) *Violation {
	invalid := func(field, format string, args ...any) *Violation {
		return &Violation{Field: field, Description: fmt.Sprintf(format, args...)}
	}
	given, field := 0, "token_ids"
	for _, form := range []struct {
		name        string
		length, max int
	}{
		{"token_ids", len(p.TokenIDs), maxTokenIDs},
		{"tokens_hashes", len(p.TokensHashes), maxHashes},
		{"block_hashes", len(p.BlockHashes), maxHashes},
	} {
		if form.length == 0 {
			continue
		}
		if given++; given == 2 {
			return invalid(form.name, "is given with %s: want one of token_ids, tokens_hashes and block_hashes", field)
		}
		if field = form.name; form.length > form.max {
			return invalid(field, "%d elements are too many: at most %d are allowed", form.length, form.max)
		}
	}
	if given == 0 {
		return invalid(field, "is empty: want token_ids, tokens_hashes or block_hashes")
	}
	if field == "token_ids" {
		return nil
	}
	const want = "is not allowed with %s, which already depend on it"
	switch {
	case p.LoRA != "":
		return invalid("lora_name", want, field)
	case p.Salt != "":
		return invalid("cache_salt", want, field)
	case p.Eagle:
		return invalid("eagle", want, field)
	case p.ExcludeLastToken:
		return invalid("exclude_last_token", "is not allowed with %s: leave out the blocks that the last token is in", field)
	}
	return nil
}
