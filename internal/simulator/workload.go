package simulator

import (
	"errors"
	"math/rand/v2"
	"slices"

	"github.com/kvcast/kvcast/ingest/wire"
)

// WorkloadConfig shapes the conversations. The zero value is a chat service whose
// steps look like those of vLLM's own pool: two thirds of the stores carry one
// block, most others 33 to 128, and a step has some twenty-five events once the
// pool is full.
type WorkloadConfig struct {
	// Conversations is the number that is open at a time; 0 means 64.
	Conversations int
	// SystemPrompts is the number of prompts they begin with; 0 means 4.
	SystemPrompts int
	// Concurrency is the most requests that run at a time; 0 means 8.
	Concurrency int
	// MinPrompt and MaxPrompt are the length of what a user says, in blocks; 0
	// means 33 and 128, or less where the pool is too small for it.
	MinPrompt, MaxPrompt int
	// MaxAnswer is the longest answer in blocks; 0 means 5.
	MaxAnswer int
	// ResetEvery is the number of steps after which the cache is reset; 0 means
	// never.
	ResetEvery int
}

func (c WorkloadConfig) withDefaults(pool PoolConfig) (WorkloadConfig, error) {
	orElse := func(field *int, value int) {
		if *field == 0 {
			*field = max(value, 1)
		}
	}
	orElse(&c.Conversations, 64)
	orElse(&c.SystemPrompts, 4)
	orElse(&c.Concurrency, 8)
	orElse(&c.MaxPrompt, min(128, pool.Capacity/4))
	orElse(&c.MinPrompt, min(33, c.MaxPrompt))
	orElse(&c.MaxAnswer, 5)
	for _, n := range []int{c.Conversations, c.SystemPrompts, c.Concurrency, c.MinPrompt, c.MaxAnswer} {
		if n < 0 {
			return c, errors.New("configure workload: a number is negative")
		}
	}
	if c.MinPrompt > c.MaxPrompt {
		return c, errors.New("configure workload: min_prompt is larger than max_prompt")
	}
	// The shortest prompt of all must fit, or no step might ever have an event:
	// both its parts may end within a block.
	if c.MinPrompt+c.maxSystem()+1 > pool.Capacity {
		return c, errors.New("configure workload: no prompt fits the pool: lower min_prompt or raise the capacity")
	}
	return c, nil
}

// maxSystem is the length of the longest system prompt in whole blocks.
func (c WorkloadConfig) maxSystem() int { return max(1, c.MinPrompt/2) }

// The odds of a step.
const (
	arrivalOdds = 0.03 // a request arrives, where there is room for one
	againOdds   = 0.1  // it is the last one of its conversation, sent again
	alignedOdds = 0.5  // what is said ends with a block
)

// vocabulary is the number of token ids.
const vocabulary = 128_000

// Workload runs conversations on a Pool, and gives the events of each step. The
// same config and seed give the same events. It is for one goroutine.
type Workload struct {
	cfg     WorkloadConfig
	pool    *Pool
	rng     *rand.Rand
	popular *rand.Zipf
	systems [][]uint32
	talks   []*conversation
	running []*answer
	steps   int
}

// conversation is several turns, each of which repeats all before it.
type conversation struct {
	tokens []uint32 // all that has been said
	prompt []uint32 // of the last request
	busy   bool
}

// answer is a request that runs.
type answer struct {
	talk    *conversation
	request *Request
	left    int // tokens to generate
}

// NewWorkload returns a Workload that has not begun.
func NewWorkload(cfg WorkloadConfig, pool *Pool, seed uint64) (*Workload, error) {
	cfg, err := cfg.withDefaults(pool.cfg)
	if err != nil {
		return nil, err
	}
	// The second word names the generator: other uses of the seed differ from it.
	rng := rand.New(rand.NewPCG(seed, 0x6b76636173742e31))
	w := &Workload{
		cfg: cfg, pool: pool, rng: rng,
		popular: rand.NewZipf(rng, 1.5, 2, uint64(cfg.Conversations-1)),
		systems: make([][]uint32, cfg.SystemPrompts),
		talks:   make([]*conversation, cfg.Conversations),
	}
	for i := range w.systems {
		w.systems[i] = w.say(nil, 1+rng.IntN(cfg.maxSystem()))
	}
	for i := range w.talks {
		w.talks[i] = w.open()
	}
	return w, nil
}

// Step returns the events of the next step that has any.
func (w *Workload) Step() []wire.Event {
	w.steps++
	if n := w.cfg.ResetEvery; n > 0 && w.steps%n == 0 {
		w.stop()
		events, _ := w.pool.Reset()
		return events
	}
	var events []wire.Event
	for len(events) == 0 {
		if len(w.running) < w.cfg.Concurrency && w.rng.Float64() < arrivalOdds {
			events = w.arrive()
		}
		events = append(events, w.generate()...)
	}
	return events
}

// Restart ends all requests and empties the pool, as the end of the engine's process
// does. The conversations go on.
func (w *Workload) Restart() {
	w.stop()
	w.pool.Restart()
}

// stop ends all requests.
func (w *Workload) stop() {
	for _, a := range w.running {
		w.finish(a)
	}
	w.running = w.running[:0]
}

// arrive starts a request of some conversation.
func (w *Workload) arrive() []wire.Event {
	i := w.popular.Uint64()
	talk := w.talks[i]
	if talk.busy {
		return nil
	}
	if talk.prompt == nil || w.rng.Float64() >= againOdds {
		// The lesser of two, because short ones are more frequent.
		choices := w.cfg.MaxPrompt - w.cfg.MinPrompt + 1
		blocks := w.cfg.MinPrompt + min(w.rng.IntN(choices), w.rng.IntN(choices))
		if len(talk.tokens)+blocks*w.pool.cfg.BlockSize > w.longest() {
			talk = w.open()
			w.talks[i] = talk
		}
		talk.prompt = slices.Concat(talk.tokens, w.say(talk.tokens, blocks))
	}
	request, events, ok := w.pool.Start(talk.prompt)
	if !ok {
		return nil
	}
	talk.busy = true
	left := 1 + w.rng.IntN(w.cfg.MaxAnswer*w.pool.cfg.BlockSize)
	w.running = append(w.running, &answer{talk, request, left})
	return events
}

// generate lets every request that runs go on by a few tokens, less than a block.
func (w *Workload) generate() []wire.Event {
	var events []wire.Event
	going := w.running[:0]
	for _, a := range w.running {
		n := min(a.left, 1+w.rng.IntN(max(1, w.pool.cfg.BlockSize/4)))
		more, ok := a.request.Extend(w.tokens(n)...)
		events = append(events, more...)
		a.left -= n
		if !ok || a.left == 0 {
			w.finish(a)
			continue
		}
		going = append(going, a)
	}
	clear(w.running[len(going):])
	w.running = going
	return events
}

func (w *Workload) finish(a *answer) {
	a.talk.tokens = a.request.Tokens()
	a.talk.busy = false
	a.request.Finish()
}

// open returns a conversation in which nobody has spoken yet.
func (w *Workload) open() *conversation {
	return &conversation{tokens: w.systems[w.rng.IntN(len(w.systems))]}
}

// longest is the length in tokens beyond which a conversation is given up: all
// that run must be able to fit.
func (w *Workload) longest() int {
	return w.pool.cfg.Capacity * w.pool.cfg.BlockSize / (w.cfg.Concurrency + 1)
}

// say returns something new of about so many blocks, to follow on what has been
// said. Half the time the two end with a block.
func (w *Workload) say(said []uint32, blocks int) []uint32 {
	size := w.pool.cfg.BlockSize
	n := blocks*size - len(said)%size
	if w.rng.Float64() >= alignedOdds {
		n += w.rng.IntN(size)
	}
	return w.tokens(n)
}

func (w *Workload) tokens(n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = w.rng.Uint32N(vocabulary)
	}
	return tokens
}
