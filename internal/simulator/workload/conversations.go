package workload

import (
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/wire"
)

// Config configures Conversations. The zero value is a chat service whose steps look like those of
// vLLM's own pool: two thirds of the stores have one block, most others 33 to 128, and a step has
// about twenty-five events once the pool is full.
type Config struct {
	// Conversations is the number of open conversations; 0 means 64.
	Conversations int
	// SystemPrompts is the number of system prompts they begin with; 0 means 4.
	SystemPrompts int
	// Concurrency is the maximum number of running requests; 0 means 8.
	Concurrency int
	// MinPrompt and MaxPrompt bound the length of a user's message, in blocks; 0 means 33 and 128,
	// or less if the pool is too small.
	MinPrompt, MaxPrompt int
	// MaxAnswer is the maximum length of an answer in blocks; 0 means 5.
	MaxAnswer int
	// ResetEvery is the number of steps between resets of the cache; 0 means never.
	ResetEvery int
}

func (c Config) withDefaults(pool *blockpool.Pool) (Config, error) {
	orElse := func(field *int, value int) {
		if *field == 0 {
			*field = max(value, 1)
		}
	}
	orElse(&c.Conversations, 64)
	orElse(&c.SystemPrompts, 4)
	orElse(&c.Concurrency, 8)
	orElse(&c.MaxPrompt, min(128, pool.Capacity()/4))
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
	// The shortest prompt must fit, otherwise a step might never have an event: both of its parts
	// may end within a block.
	if c.MinPrompt+c.maxSystem()+1 > pool.Capacity() {
		return c, errors.New("configure workload: no prompt fits the pool: lower min_prompt or raise the capacity")
	}
	return c, nil
}

// maxSystem is the maximum length of a system prompt in whole blocks.
func (c Config) maxSystem() int { return max(1, c.MinPrompt/2) }

// Probabilities per step.
const (
	arrivalOdds = 0.03 // a request arrives, if fewer than Concurrency run
	repeatOdds  = 0.1  // it repeats the last request of its conversation
	alignedOdds = 0.5  // a message ends at the end of a block
)

// vocabulary is the number of token ids.
const vocabulary = 128_000

// Conversations is an endless Workload of chats at a steady rate.
type Conversations struct {
	cfg     Config
	pool    *blockpool.Pool
	rng     *rand.Rand
	popular *rand.Zipf
	systems [][]uint32
	chats   []*conversation
	running []*answer
	rate    float64 // in steps per second; 0 means as fast as possible
	steps   int
}

// conversation is a sequence of requests, each of which begins with all previous ones.
type conversation struct {
	tokens []uint32 // of all requests and answers so far
	prompt []uint32 // of the last request
	busy   bool     // a request is running
}

// answer is a running request.
type answer struct {
	chat    *conversation
	request *blockpool.Request
	left    int // tokens to generate
}

// NewConversations returns the workload of a seed, at a rate in steps per second; 0 means as fast
// as possible.
func NewConversations(cfg Config, pool *blockpool.Pool, seed uint64, rate float64) (*Conversations, error) {
	cfg, err := cfg.withDefaults(pool)
	if err != nil {
		return nil, err
	}
	// The second word separates this use of the seed from others.
	rng := rand.New(rand.NewPCG(seed, 0x6b76636173742e31))
	w := &Conversations{
		cfg: cfg, pool: pool, rng: rng, rate: rate,
		popular: rand.NewZipf(rng, 1.5, 2, uint64(cfg.Conversations-1)),
		systems: make([][]uint32, cfg.SystemPrompts),
		chats:   make([]*conversation, cfg.Conversations),
	}
	for i := range w.systems {
		w.systems[i] = w.message(nil, 1+rng.IntN(cfg.maxSystem()))
	}
	for i := range w.chats {
		w.chats[i] = w.open()
	}
	return w, nil
}

// Due implements Workload.
func (w *Conversations) Due() (time.Duration, bool) {
	if w.rate == 0 {
		return 0, true
	}
	return time.Duration(float64(w.steps) / w.rate * float64(time.Second)), true
}

// Lost implements Workload: every request fits and finishes.
func (w *Conversations) Lost() (refused, cut uint64) { return 0, 0 }

// Step implements Workload. It returns at least one event.
func (w *Conversations) Step() []wire.Event {
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

// Restart implements Workload. The conversations continue.
func (w *Conversations) Restart() {
	w.stop()
	w.pool.Restart()
}

// stop ends all running requests.
func (w *Conversations) stop() {
	for _, a := range w.running {
		w.finish(a)
	}
	w.running = w.running[:0]
}

// arrive starts a request of a random conversation.
func (w *Conversations) arrive() []wire.Event {
	i := w.popular.Uint64()
	chat := w.chats[i]
	if chat.busy {
		return nil
	}
	if chat.prompt == nil || w.rng.Float64() >= repeatOdds {
		// The minimum of two draws: short messages are more frequent.
		choices := w.cfg.MaxPrompt - w.cfg.MinPrompt + 1
		blocks := w.cfg.MinPrompt + min(w.rng.IntN(choices), w.rng.IntN(choices))
		if len(chat.tokens)+blocks*w.pool.BlockSize() > w.maxTokens() {
			chat = w.open()
			w.chats[i] = chat
		}
		chat.prompt = slices.Concat(chat.tokens, w.message(chat.tokens, blocks))
	}
	request, events, ok := w.pool.Start(chat.prompt)
	if !ok {
		return nil
	}
	chat.busy = true
	left := 1 + w.rng.IntN(w.cfg.MaxAnswer*w.pool.BlockSize())
	w.running = append(w.running, &answer{chat, request, left})
	return events
}

// generate generates a few tokens, less than a block, for every running request.
func (w *Conversations) generate() []wire.Event {
	var events []wire.Event
	unfinished := w.running[:0]
	for _, a := range w.running {
		n := min(a.left, 1+w.rng.IntN(max(1, w.pool.BlockSize()/4)))
		more, ok := a.request.Extend(w.tokens(n)...)
		events = append(events, more...)
		a.left -= n
		if !ok || a.left == 0 {
			w.finish(a)
			continue
		}
		unfinished = append(unfinished, a)
	}
	clear(w.running[len(unfinished):])
	w.running = unfinished
	return events
}

func (w *Conversations) finish(a *answer) {
	a.chat.tokens = a.request.Tokens()
	a.chat.busy = false
	a.request.Finish()
}

// open returns a new conversation, which consists of a system prompt.
func (w *Conversations) open() *conversation {
	return &conversation{tokens: w.systems[w.rng.IntN(len(w.systems))]}
}

// maxTokens returns the length above which a conversation is replaced by a new one: Concurrency
// requests must fit the pool together.
func (w *Conversations) maxTokens() int {
	return w.pool.Capacity()*w.pool.BlockSize()/(w.cfg.Concurrency+1) - w.pool.FurtherBlocks()*w.pool.BlockSize()
}

// message returns new tokens of about the given number of blocks that follow the given tokens. With
// a probability of alignedOdds both together end at the end of a block.
func (w *Conversations) message(before []uint32, blocks int) []uint32 {
	size := w.pool.BlockSize()
	n := blocks*size - len(before)%size
	if w.rng.Float64() >= alignedOdds {
		n += w.rng.IntN(size)
	}
	return w.tokens(n)
}

func (w *Conversations) tokens(n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = w.rng.Uint32N(vocabulary)
	}
	return tokens
}
