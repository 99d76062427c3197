// Package hybrid finds the longest prefix of a prompt that an engine with several attention groups can reuse.
//
// In: the attention groups of an engine, which New compiles into a Rule once, and for each prompt a Holder, which tells
// which prefixes each group holds. Out: the length of the prefix that the engine reuses, in tokens, and the group that ends it.
//
// The rule is that of vLLM 0.33, of its KV cache coordinator and of the managers of each kind of group. Without EAGLE it is: the longest
// prefix within a limit, of a length that is a multiple of Rule.Align, which each group serves. A group serves a prefix as follows.
//
//   - Full attention, with MLA or sinks too, holds all blocks of the prefix.
//   - A sliding window, with MLA too, holds the last blocks of the prefix, as many as the window needs.
//   - Mamba holds the state at the end of the prefix.
//   - Chunked local attention holds the blocks of the prefix's last chunk. If the prefix ends with a chunk, it needs none.
//
// An engine that drafts tokens with EAGLE or MTP drops a block of what a group finds, because the drafter needs the
// hidden states of the last tokens. The prefix then depends on the order in which the engine asks its groups (Rule.longest).
//
// What is not in an engine's events must be configured: the chunk, and which groups drop. The rule does not cover decode context
// parallelism, groups that vLLM caches no prefixes of (their block size counts in the least common multiple), DeepSeek V4.1's
// bounded replay, and offload connectors other than SimpleCPUOffloadConnector.
//
// The package is pure: it has no state but the Rule, which does not change. A Rule may be used by several goroutines.
package hybrid

import "slices"

// Rule is the rule of an engine with a set of attention groups. New makes a Rule. The zero Rule has no groups: no prefix can be reused.
type Rule struct {
	// full are the specs of full attention, others all other specs. A spec is a set of groups that are equal but for their index:
	// vLLM asks them together.
	full, others []spec
	unit         int
	align        int
	blocks       int // least common multiple of the block sizes
	groups       int
}

// Unit returns the number of tokens of a hash unit: a prefix has a name if its length is a multiple of it.
func (r *Rule) Unit() int { return r.unit }

// Align returns the number of tokens of which the length of each reusable prefix is a multiple. It is Unit if Mamba groups
// have partial hits, and else the least common multiple of the block sizes. It is 0 in the zero Rule.
func (r *Rule) Align() int { return r.align }

// Drops reports whether the engine drops a block of what it finds in some group, and so asks for more than it reuses.
func (r *Rule) Drops() bool {
	drops := func(s spec) bool { return s.drop }
	return slices.ContainsFunc(r.full, drops) || slices.ContainsFunc(r.others, drops)
}

// Equal reports whether two rules are those of the same groups, with the same hash unit.
func (r *Rule) Equal(o *Rule) bool {
	equal := func(a, b spec) bool { return a.key == b.key && a.drop == b.drop && slices.Equal(a.groups, b.groups) }
	return r == o || r.unit == o.unit && r.align == o.align && r.groups == o.groups &&
		slices.EqualFunc(r.full, o.full, equal) && slices.EqualFunc(r.others, o.others, equal)
}

// Longest returns the length of the longest prefix that the engine reuses, in tokens. h tells what the groups hold in device
// memory. limit is the length of the longest prefix that is allowed, in tokens: an engine always computes the last token of a
// prompt, so that it reuses at most all tokens but one. hashed is the number of tokens that are part of a hash unit with a name:
// all whole units of the prompt, also beyond limit, since EAGLE looks further than what it reuses.
//
// endedBy is the index of the group because of which the prefix is not longer; of several groups that are equal but for their index, the
// first; NoGroup if the prompt or the limit ends the prefix.
//
// Longest does not allocate. It asks h only for positions up to hashed.
func (r *Rule) Longest(h Holder, limit, hashed int) (tokens, endedBy int) {
	return r.longest(&prompt{holder: h, hashed: hashed}, limit)
}

// NoGroup is returned in place of a group's index if no group ends the prefix.
const NoGroup = -1

// LongestWithHost returns the length of the prefix that the engine reuses together with a host tier of vLLM's
// SimpleCPUOffloadConnector. device is what Longest returned for device memory; h tells what the groups hold in host memory; limit and
// hashed are as for Longest, and count from the prompt's first token as well as the positions that h is asked for.
//
// The engine rounds device down to whole blocks of all groups. To the tokens from there on it applies the same rule, as if
// they were a prompt: the groups need no block before them, windows do not extend into device memory, and chunks are
// counted from there. The result is at least device: the engine keeps a partial hit unless host memory has more.
func (r *Rule) LongestWithHost(h Holder, device, limit, hashed int) int {
	if r.groups == 0 {
		return device
	}
	start := device - device%r.blocks
	tokens, _ := r.longest(&prompt{holder: h, start: start, hashed: hashed - start}, limit-start)
	return max(device, start+tokens)
}

// longest implements Longest. Each spec accepts the length or lowers it:
//
//  1. Full attention is asked once: it also serves all shorter prefixes.
//  2. The others are asked in turns until all accept the length.
//  3. A spec that drops is asked for a longer prefix, and drops that again: once for each candidate, until a spec that
//     does not drop lowers the length. (vLLM: once the drop of a spec is verified, the spec is asked as if it had none.)
//  4. A group that is alone is asked once, without (3).
func (r *Rule) longest(p *prompt, limit int) (tokens, endedBy int) {
	endedBy = NoGroup
	hit := min(limit, p.hashed)
	if hit <= 0 || r.groups == 0 {
		return 0, endedBy
	}
	alone := r.groups == 1
	ask := func(s *spec, limit int, drop bool) int {
		n := s.lower(p, limit, drop, alone)
		if n < limit-limit%r.align {
			endedBy = s.groups[0]
		}
		return n
	}
	for i := range r.full {
		hit = ask(&r.full[i], hit, r.full[i].drop)
	}
	if alone && len(r.others) == 1 {
		return ask(&r.others[0], hit, r.others[0].drop), endedBy
	}
	var verified uint64 // specs of which the drop is verified, by their index in others
	for cur := hit; hit > 0; hit = cur {
		for i := range r.others {
			s := &r.others[i]
			drop := s.drop && verified&(1<<i) == 0
			n := ask(s, cur, drop)
			if drop {
				verified |= 1 << i
			} else if n < cur {
				verified = 0
			}
			cur = n
		}
		if cur == hit {
			break
		}
	}
	return hit, endedBy
}
