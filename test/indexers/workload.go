// Package indexers measures indexes of blocks on one workload: kvcast's package radix and, for comparison, indexes of
// other projects.
//
// In: events of 64 workers, and prompts (Workload), generated from a fixed seed. Out: Figures, and the answers to the
// prompts, which must be the same for all indexes.
//
// Command compare runs all indexes, each in a process of its own, and prints a table. Module llmd has llm-d's index, and
// crate rust those of SMG and Dynamo. They read the workload from a file.
package indexers

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
)

// Workers is the number of workers.
const Workers = 64

// Event is a store or a remove of one worker. Its slices are views of the workload.
type Event struct {
	Worker int
	Stored bool // false: a remove
	// Parent is the block hash before the first block of a store, if HasParent; otherwise the store starts a prompt.
	Parent    uint64
	HasParent bool
	// Blocks are block hashes, which depend on all blocks before, and are the same on all workers.
	Blocks []uint64
	// Tokens are the tokens hashes of a store's blocks.
	Tokens []uint64
}

// Prompt is what is looked up. Its slices are views of the workload.
type Prompt struct {
	// Tokens and Blocks are the tokens hashes and the block hashes of the prompt's blocks.
	Tokens, Blocks []uint64
}

// Phase is a sequence of events, and the prompts that are looked up after it.
type Phase struct {
	words   []uint64 // the encoded events
	Blocks  int      // number of blocks stored and removed
	prompts []uint64 // the encoded prompts
	Prompts int      // number of prompts
}

// The phases. Each is applied to an empty index, except for Churn, which follows Fill.
const (
	// Fill stores 1,000,000 blocks: conversations that start with one of 64 system prompts.
	Fill = iota
	// Churn continues: each store evicts as many blocks of its worker.
	Churn
	// Long stores prefixes of one prompt of 1,000 blocks, of another length on each worker.
	Long
	// Short is Long with 32 blocks.
	Short
	// Shared stores 64 system prompts of 128 blocks on each worker.
	Shared
	// Mix continues Shared: 4,096 conversations of 138 blocks after a system prompt, each on two workers.
	Mix
	numPhases
)

// Workload is the events and prompts of all phases.
type Workload struct {
	Phases [numPhases]Phase
	// Checksum is the same for equal workloads.
	Checksum uint64
}

// An event is encoded as a word with the number of blocks, the worker and the flags, the parent, the block hashes, and a
// store's tokens hashes. A prompt is encoded as its number of blocks, the tokens hashes and the block hashes.
const (
	workerShift = 32
	storedBit   = 1 << 40
	parentBit   = 1 << 41
)

// Events calls do for each event. The event is reused.
func (p *Phase) Events(do func(*Event)) {
	var e Event
	for w := p.words; len(w) > 0; {
		head, n := w[0], int(uint32(w[0]))
		e.Worker, e.Stored, e.HasParent = int(head>>workerShift&0xff), head&storedBit != 0, head&parentBit != 0
		e.Parent, e.Blocks, e.Tokens = w[1], w[2:2+n], nil
		w = w[2+n:]
		if e.Stored {
			e.Tokens, w = w[:n], w[n:]
		}
		do(&e)
	}
}

// AllPrompts returns the prompts.
func (p *Phase) AllPrompts() []Prompt {
	all := make([]Prompt, 0, p.Prompts)
	for w := p.prompts; len(w) > 0; {
		n := int(w[0])
		all = append(all, Prompt{Tokens: w[1 : 1+n], Blocks: w[1+n : 1+2*n]})
		w = w[1+2*n:]
	}
	return all
}

func (p *Phase) store(worker int, parent uint64, hasParent bool, blocks, tokens []uint64) {
	head := uint64(len(blocks)) | uint64(worker)<<workerShift | storedBit
	if hasParent {
		head |= parentBit
	}
	p.words = append(append(append(p.words, head, parent), blocks...), tokens...)
	p.Blocks += len(blocks)
}

func (p *Phase) remove(worker int, blocks ...uint64) {
	p.words = append(append(p.words, uint64(len(blocks))|uint64(worker)<<workerShift, 0), blocks...)
	p.Blocks += len(blocks)
}

func (p *Phase) prompt(tokens, blocks []uint64) {
	p.prompts = append(append(append(p.prompts, uint64(len(tokens))), tokens...), blocks...)
	p.Prompts++
}

// WriteFile writes a workload: for each phase four words, the numbers of words of the events, of blocks, of words of the
// prompts, and of prompts; then its events and its prompts. Words are little-endian.
func (w *Workload) WriteFile(name string) error {
	var b []byte
	for i := range w.Phases {
		p := &w.Phases[i]
		for _, n := range []int{len(p.words), p.Blocks, len(p.prompts), p.Prompts} {
			b = binary.LittleEndian.AppendUint64(b, uint64(n))
		}
		for _, words := range [][]uint64{p.words, p.prompts} {
			for _, word := range words {
				b = binary.LittleEndian.AppendUint64(b, word)
			}
		}
	}
	if err := os.WriteFile(name, b, 0o600); err != nil {
		return fmt.Errorf("write workload: %w", err)
	}
	return nil
}

// ReadFile reads the workload that WriteFile wrote.
func ReadFile(name string) (*Workload, error) {
	b, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("read workload: %w", err)
	}
	words := make([]uint64, len(b)/8)
	for i := range words {
		words[i] = binary.LittleEndian.Uint64(b[8*i:])
	}
	w := &Workload{}
	for i := range w.Phases {
		if len(words) < 4 || words[0]+words[2] > uint64(len(words)-4) {
			return nil, errors.New("read workload: the file is truncated")
		}
		events, prompts := words[0], words[2]
		w.Phases[i] = Phase{words: words[4 : 4+events], Blocks: int(words[1]), Prompts: int(words[3])}
		words = words[4+events:]
		w.Phases[i].prompts, words = words[:prompts], words[prompts:]
	}
	w.Checksum = w.sum()
	return w, nil
}

// sum returns the FNV-1a hash of the words of all events and prompts, a word at a time.
func (w *Workload) sum() uint64 {
	h := uint64(0xcbf29ce484222325)
	for i := range w.Phases {
		for _, words := range [][]uint64{w.Phases[i].words, w.Phases[i].prompts} {
			for _, word := range words {
				h = (h ^ word) * 0x100000001b3
			}
		}
	}
	return h
}
