// Package vllm tests kvcast with a real vLLM engine, which runs on the CPU without weights (testdata/engine.py). make vllm prepares it; without it, the tests
// are skipped.
//
// Before each request, kvcast is asked for the prefix of the prompt that the engine holds. The engine then says how many tokens it has reused, and which
// blocks its pool has after its last batch: both must be what kvcast says wherever it says EXACT. A scenario is a row of a table that the tests write to bin/test/vllm.md.
package vllm
