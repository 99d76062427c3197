package vllm_test

import (
	"math/rand/v2"
	"slices"
)

const (
	blockSize = 32
	// maxPrompt is the length of the longest prompt, in tokens.
	maxPrompt = 900
)

// workload generates prompts that share prefixes: system prompts, conversations that go on, repetitions, and prompts of which nothing is known. Many lengths are at or next to
// the end of a block.
type workload struct {
	rng     *rand.Rand
	salts   []string // that prompts have, with "" for none
	loras   []string
	systems [][]uint32
	chats   []prompt
}

func newWorkload(seed uint64) *workload {
	w := &workload{rng: rand.New(rand.NewPCG(seed, 1)), salts: []string{""}, loras: []string{""}}
	for n := range 4 {
		w.systems = append(w.systems, w.tokens((n+1)*blockSize+n))
	}
	return w
}

func (w *workload) tokens(n int) []uint32 {
	list := make([]uint32, n)
	for i := range list {
		list[i] = w.rng.Uint32N(250)
	}
	return list
}

// length returns the length of a part of a prompt.
func (w *workload) length() int {
	if w.rng.IntN(2) == 0 {
		return 1 + w.rng.IntN(5*blockSize)
	}
	return (1+w.rng.IntN(5))*blockSize - 1 + w.rng.IntN(3)
}

// next returns a prompt. Salt and adapter do not depend on the tokens, so that equal tokens have different ones.
func (w *workload) next() prompt {
	p := prompt{MaxTokens: 1 + w.rng.IntN(3)}
	switch choice := w.rng.IntN(8); {
	case choice < 3:
		p.Tokens = slices.Concat(w.systems[w.rng.IntN(len(w.systems))], w.tokens(w.length()))
	case choice < 5 && len(w.chats) > 0:
		chat := w.chats[w.rng.IntN(len(w.chats))]
		p.Tokens = slices.Concat(chat.Tokens, w.tokens(w.length()))
	case choice < 7 && len(w.chats) > 0:
		p.Tokens = w.chats[w.rng.IntN(len(w.chats))].Tokens
	default:
		p.Tokens = w.tokens(w.length() + 1)
	}
	p.Tokens = p.Tokens[:min(len(p.Tokens), maxPrompt)]
	if w.rng.IntN(6) == 0 {
		p.MaxTokens = 40 // a block of generated tokens
	}
	p.Salt = w.salts[w.rng.IntN(len(w.salts))]
	p.LoRA = w.loras[w.rng.IntN(len(w.loras))]
	return p
}

// answered has later prompts continue or repeat a prompt.
func (w *workload) answered(p prompt, out []uint32) {
	p.Tokens = slices.Concat(p.Tokens, out)
	w.chats = append(w.chats, p)
	if len(w.chats) > 40 {
		w.chats = w.chats[1:]
	}
}

// run sends prompts to the engine of a scenario, one at a time.
func (s *scenario) run(w *workload, requests int) {
	s.t.Helper()
	for range requests {
		p := w.next()
		w.answered(p, s.request(p))
	}
	if s.requests >= 10 && s.reused == 0 {
		s.t.Errorf("%s: the engine has reused nothing in %d requests", s.name, s.requests)
	}
}
