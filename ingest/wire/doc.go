// Package wire reads what LLM engines publish about their KV caches.
//
// A MessagePack payload flows in, a Batch flows out, in memory that the Decoder
// uses again. Every engine's form is read, chosen for each level and each event
// by what stands there. Bad input is an error or a skipped event with a reason,
// never a crash, and takes no memory out of proportion to its size.
package wire
