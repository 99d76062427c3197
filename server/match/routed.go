package match

import (
	"fmt"
	"time"

	"github.com/kvcast/kvcast/internal/core/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Limits of routed prompts.
const (
	MaxRouted  = 64 // of a request
	defaultTTL = 2 * time.Second
	maxTTL     = time.Minute
)

// CheckRouted returns the invalid fields of routed prompts.
func CheckRouted(all []*kvcastv1.RoutedPrompt) (violations []*Violation) {
	violate := func(field, format string, args ...any) {
		violations = append(violations, &Violation{Field: field, Description: fmt.Sprintf(format, args...)})
	}
	if len(all) > MaxRouted {
		violate("routed", "more than %d prompts are not allowed", MaxRouted)
		return violations
	}
	for i, r := range all {
		field := fmt.Sprintf("routed[%d].", i)
		if r.GetWorker() == "" {
			violate(field+"worker", "is missing: want a worker's name")
		}
		if n := r.GetTtlNano(); n > uint64(maxTTL) {
			violate(field+"ttl_nano", "%d is not allowed: want at most %d, which is %v", n, uint64(maxTTL), maxTTL)
		}
		if len(r.GetPrompt().GetBlockHashes()) > 0 {
			violate(field+"prompt.block_hashes", "are not allowed: want token_ids or tokens_hashes, which say what the blocks will be")
			continue
		}
		p := promptOf(r.GetPrompt())
		if why := invalidPrompt(&p); why != nil {
			violate(field+"prompt."+why.GetField(), "%s", why.GetDescription())
		}
	}
	return violations
}

// Routed returns a routed prompt as the index takes it, and how long its blocks are expected. The prompt references the message.
func Routed(r *kvcastv1.RoutedPrompt) (p index.Prompt, ttl time.Duration) {
	if ttl = time.Duration(r.GetTtlNano()); ttl == 0 {
		ttl = defaultTTL
	}
	return promptOf(r.GetPrompt()), ttl
}

// RoutedBytes estimates the memory of routed prompts and of what is computed from them.
func RoutedBytes(all []*kvcastv1.RoutedPrompt) (bytes int64) {
	for _, r := range all {
		p := r.GetPrompt()
		bytes += outcomeBytes + int64(8*(len(p.GetTokenIds())+len(p.GetTokensHashes())+len(p.GetBlockHashes())))
	}
	return bytes
}

func promptOf(p *kvcastv1.Prompt) index.Prompt {
	return index.Prompt{
		TokenIDs: p.GetTokenIds(), TokensHashes: p.GetTokensHashes(), BlockHashes: p.GetBlockHashes(),
		LoRA: p.GetLoraName(), Salt: p.GetCacheSalt(), Eagle: p.GetEagle(), BlockSize: p.GetBlockSize(),
		ExcludeLastToken: p.GetExcludeLastToken(),
	}
}
