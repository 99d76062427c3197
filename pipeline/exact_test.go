package pipeline_test

import (
	"encoding/binary"
	"slices"
	"strconv"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// prompts are the prompts that a recorded engine has stored, read from its events alone. vLLM sends a prompt's cache salt as
// the last string of the first block's extra keys.
type prompts struct {
	blocks map[uint64]promptBlock // by block hash
	order  []uint64
}

type promptBlock struct {
	parent    uint64
	hasParent bool
	tokens    []uint32
	salt      string
}

func (p *prompts) store(t *testing.T, e *wire.Event, blockSize int) {
	t.Helper()
	salt := ""
	if e.HasParent {
		salt = p.blocks[e.Parent].salt
	} else if e.Raw != nil && e.Raw.ExtraKeys != nil {
		salt = lastString(t, e.Raw.ExtraKeys)
	}
	parent, hasParent := e.Parent, e.HasParent
	for i, h := range e.BlockHashes {
		if _, known := p.blocks[h]; !known {
			p.order = append(p.order, h)
		}
		p.blocks[h] = promptBlock{parent, hasParent, slices.Clone(e.Tokens[i*blockSize : (i+1)*blockSize]), salt}
		parent, hasParent = h, true
	}
}

// lastString returns the last string of the first list in a list of lists; empty if it is nil.
func lastString(t *testing.T, p []byte) (s string) {
	t.Helper()
	all, _, err := msgp.ReadIntfBytes(p)
	if err != nil {
		t.Fatal(err)
	}
	first, _ := all.([]any)[0].([]any)
	for _, key := range first {
		if text, ok := key.(string); ok {
			s = text
		}
	}
	return s
}

// prompt returns the tokens and the salt of the prompt that ends with a block; ok is false if its beginning is not known.
func (p *prompts) prompt(hash uint64) (tokens []uint32, salt string, ok bool) {
	for {
		b, known := p.blocks[hash]
		if !known {
			return nil, "", false
		}
		tokens, salt = append(slices.Clone(b.tokens), tokens...), b.salt
		if !b.hasParent {
			return tokens, salt, true
		}
		hash = b.parent
	}
}

// content identifies a prefix and its salt.
func content(salt string, tokens []uint32) string {
	b := strconv.AppendQuote(nil, salt)
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	return string(b)
}

// TestExactMatchesEqualTheEngines plays recordings of real engines, and matches the prompts that an engine has stored, each
// with its salt, without one, and with those of others. A match that is exact is what the engine's pool would reuse.
func TestExactMatchesEqualTheEngines(t *testing.T) {
	testclass.WithoutRace(t)
	for _, name := range []string{"plain_v0", "plain_v1", "salts", "restart_reset_salts_preempt", "offload_cpu_reset"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			batches, blockSize := readRecording(t, "vllm-real/"+name)
			s, err := newSubject(pipeline.Config{})
			if err != nil {
				t.Fatal(err)
			}
			p := newRecordingPlayer(s, wire.BlockSize{})
			pool, stored := &labelledPool{}, &prompts{blocks: make(map[uint64]promptBlock)}
			exact := 0
			for n, b := range batches {
				p.play(t, b)
				held := pool.apply(t, b, blockSize)
				batch, err := new(wire.Decoder).Decode(b.payload)
				if err != nil {
					t.Fatal(err)
				}
				if b.restart {
					stored.blocks, stored.order = make(map[uint64]promptBlock), nil
				}
				for i := range batch.Events {
					if e := &batch.Events[i]; e.Kind == wire.KindStored && len(e.Tokens) > 0 {
						stored.store(t, e, int(blockSize))
					}
				}
				if n%7 != 0 && n != len(batches)-1 {
					continue
				}
				holds := make(map[string]bool)
				for h := range held {
					if tokens, salt, ok := stored.prompt(h); ok {
						holds[content(salt, tokens)] = true
					}
				}
				for i := 0; i < len(stored.order); i += max(1, len(stored.order)/20) {
					tokens, own, ok := stored.prompt(stored.order[i])
					if !ok {
						continue
					}
					for _, salt := range slices.Compact(slices.Sorted(slices.Values([]string{"", own, "tenant-a", "tenant-b", "another"}))) {
						want := 0
						for want < len(tokens)/int(blockSize) && holds[content(salt, tokens[:(want+1)*int(blockSize)])] {
							want++
						}
						got, trusted := s.match(tokens, salt)
						if trusted && got != want {
							t.Fatalf("after batch %d, salt %q: %d blocks are matched as exact, the engine has %d", n, salt, got, want)
						}
						if trusted {
							exact++
						}
					}
				}
			}
			if exact < 1000 {
				t.Errorf("%d matches were exact", exact)
			}
		})
	}
}

// isExact reports whether nothing makes the blocks in device memory differ from the engine's.
func (s *subject) isExact() bool {
	w, _ := s.journal.index.Worker(testWorker)
	return len(w.Ranks) > 0 && w.Ranks[0].TierReasons[0] == 0
}

// match returns the blocks of a prompt in device memory, and whether they are exact.
func (s *subject) match(tokens []uint32, salt string) (blocks int, exact bool) {
	var m index.Matches
	s.journal.index.Match(&index.Query{Model: "m", Prompts: []index.Prompt{{TokenIDs: tokens, Salt: salt}}}, &m)
	if len(m.Prompts[0]) == 0 {
		return 0, s.isExact()
	}
	return m.Prompts[0][0].TierBlocks[0], m.Prompts[0][0].TierTrust(0) == kvcastv1.Trust_TRUST_EXACT
}
