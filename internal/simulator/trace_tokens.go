package simulator

// Prompt returns the tokens of the prompt. They follow from the ids alone: prompts
// with the same first ids have the same first tokens, at any block size.
func (r TraceRequest) Prompt() []uint32 {
	prompt := make([]uint32, r.Input)
	for i := range prompt {
		prompt[i] = traceToken(r.IDs[i/TraceBlock], uint64(i%TraceBlock))
	}
	return prompt
}

// outputs is what the ids of what is generated begin with, and those of prompts, which
// count from 0, do not.
const outputs = 1 << 63

// traceToken returns a token of what an id stands for.
func traceToken(id, at uint64) uint32 {
	return uint32(splitmix64(splitmix64(id)^at) % vocabulary)
}
