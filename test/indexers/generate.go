package indexers

import "math/rand/v2"

const (
	perWorker     = 1_000_000 / Workers
	systemPrompts = 64
	// systemBlocks is the number of blocks of a system prompt in Fill and Churn; sharedBlocks in Shared and Mix.
	systemBlocks, sharedBlocks = 16, 128
	// active is the number of conversations that run at a time on a worker.
	active = 16
	// meanAnswer is the mean number of blocks of an answer, which are stored one at a time: with one store of a
	// question before, 95 % of the stores are of one block.
	meanAnswer = 19
	// lookups is the number of prompts after Churn.
	lookups    = 1_000
	mixPrompts = 4_096
	// mixBlocks is the number of blocks of a conversation in Mix, after its system prompt.
	mixBlocks = 138
)

// Generate returns the workload, the same in each call.
func Generate() *Workload {
	w := &Workload{}
	w.conversations()
	w.prefixes(&w.Phases[Long], 1, 1000)
	w.prefixes(&w.Phases[Short], 2, 32)
	w.mix()
	w.Checksum = w.sum()
	return w
}

// mixed returns a well-distributed hash of a number.
func mixed(n uint64) uint64 {
	n = (n ^ n>>30) * 0xbf58476d1ce4e5b9
	n = (n ^ n>>27) * 0x94d049bb133111eb
	return n ^ n>>31
}

// chain is the blocks of a prompt.
type chain struct{ tokens, blocks []uint64 }

// extend appends n blocks with contents that follow from a name.
func (c *chain) extend(name uint64, n int) {
	for range n {
		tokens := mixed(name<<20 + uint64(len(c.tokens)) + 1)
		block := mixed(tokens + 0x9e3779b97f4a7c15)
		if k := len(c.blocks); k > 0 {
			block = mixed(c.blocks[k-1] ^ tokens*0x9e3779b97f4a7c15)
		}
		c.tokens, c.blocks = append(c.tokens, tokens), append(c.blocks, block)
	}
}

func newChain(name uint64, n int) *chain {
	c := &chain{}
	c.extend(name, n)
	return c
}

// storeFrom stores the blocks of a chain from an offset on.
func (p *Phase) storeFrom(worker int, c *chain, from int) {
	var parent uint64
	if from > 0 {
		parent = c.blocks[from-1]
	}
	p.store(worker, parent, from > 0, c.blocks[from:], c.tokens[from:])
}

// conversation is a chain that grows.
type conversation struct {
	chain
	name   uint64
	answer int // blocks left of the current answer
	turns  int // turns left
}

// worker is an engine that stores conversations, and evicts the oldest from their ends. It never evicts system prompts.
type worker struct {
	number int
	system [systemPrompts]bool // those that it holds
	held   int                 // blocks
	next   uint64              // name of the next conversation
	active [active]*conversation
	idle   []*conversation
}

// conversations makes Fill and Churn.
func (w *Workload) conversations() {
	random := rand.New(rand.NewPCG(1, 2))
	system := make([]*chain, systemPrompts)
	for i := range system {
		system[i] = newChain(uint64(i+1), systemBlocks)
	}
	workers := make([]worker, Workers)
	for i := range workers {
		workers[i] = worker{number: i, next: uint64(i+1) << 24}
	}
	fill, churn := &w.Phases[Fill], &w.Phases[Churn]
	for done := 0; done < Workers; {
		done = 0
		for i := range workers {
			if workers[i].held >= perWorker {
				done++
				continue
			}
			workers[i].step(fill, random, system)
		}
	}
	for churn.Blocks < 2*Workers*perWorker {
		for i := range workers {
			before := workers[i].held
			// The evictions come first, as in an engine: their number is that of the stores of a copy of the step.
			var stores Phase
			workers[i].step(&stores, random, system)
			for workers[i].held > before {
				workers[i].evict(churn)
			}
			churn.words = append(churn.words, stores.words...)
			churn.Blocks += stores.Blocks
		}
	}
	for range lookups {
		k := &workers[random.IntN(Workers)]
		c := k.active[random.IntN(active)]
		if random.IntN(2) == 0 {
			c = k.idle[random.IntN(len(k.idle))]
		}
		if c == nil {
			c = k.idle[0]
		}
		churn.prompt(c.tokens, c.blocks)
	}
}

// step stores the next block of the answer of a conversation, or the next question.
func (k *worker) step(p *Phase, random *rand.Rand, system []*chain) {
	v := &k.active[random.IntN(active)]
	switch {
	case *v == nil:
		k.next++
		s := random.IntN(systemPrompts)
		if !k.system[s] {
			k.system[s] = true
			p.storeFrom(k.number, system[s], 0)
			k.held += systemBlocks
		}
		*v = &conversation{name: k.next, turns: 1 + random.IntN(8)}
		(*v).tokens = append((*v).tokens, system[s].tokens...)
		(*v).blocks = append((*v).blocks, system[s].blocks...)
		fallthrough
	case (*v).answer == 0:
		c := *v
		if c.turns == 0 {
			k.idle = append(k.idle, c)
			*v = nil
			return
		}
		c.turns--
		c.answer = meanAnswer/2 + random.IntN(meanAnswer+1)
		k.grow(p, c, 2+random.IntN(8))
	default:
		(*v).answer--
		k.grow(p, *v, 1)
	}
}

// grow stores the next n blocks of a conversation.
func (k *worker) grow(p *Phase, c *conversation, n int) {
	from := len(c.tokens)
	c.extend(c.name, n)
	p.storeFrom(k.number, &c.chain, from)
	k.held += n
}

// evict removes the last block of the oldest idle conversation.
func (k *worker) evict(p *Phase) {
	c := k.idle[0]
	last := len(c.blocks) - 1
	p.remove(k.number, c.blocks[last])
	c.tokens, c.blocks = c.tokens[:last], c.blocks[:last]
	k.held--
	if last == systemBlocks {
		k.idle = k.idle[1:]
	}
}

// prefixes makes a phase in which each worker has another prefix of a prompt.
func (*Workload) prefixes(p *Phase, name uint64, blocks int) {
	c := newChain(name, blocks)
	for i := range Workers {
		n := max(1, blocks*(i+1)/Workers)
		p.store(i, 0, false, c.blocks[:n], c.tokens[:n])
	}
	p.prompt(c.tokens, c.blocks)
}

// mix makes Shared and Mix.
func (w *Workload) mix() {
	shared, mix := &w.Phases[Shared], &w.Phases[Mix]
	for i := range uint64(systemPrompts) {
		c := newChain(i+1, sharedBlocks)
		for k := range Workers {
			shared.storeFrom(k, c, 0)
		}
	}
	for i := range uint64(mixPrompts) {
		c := newChain(i%systemPrompts+1, sharedBlocks)
		c.extend(i+1<<24, mixBlocks)
		for _, k := range []uint64{i, i * 7 / 5} {
			mix.storeFrom(int(k%Workers), c, sharedBlocks)
		}
		mix.prompt(c.tokens, c.blocks)
	}
}
