package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
)

// backend is a simulated engine of the demo: a block pool that publishes events as vLLM does, and an HTTP server that
// returns empty completions.
type backend struct {
	name      string
	publisher *simulator.Publisher
	listener  net.Listener
	server    *http.Server
	served    chan error

	// held, if it is not nil, receives a channel for each request, which is computed when that is closed.
	held chan<- chan struct{}

	mu   sync.Mutex
	pool *blockpool.Pool // guarded by mu
}

func newBackend(ctx context.Context, name string, held chan<- chan struct{}) (*backend, error) {
	pool, err := blockpool.New(blockpool.Config{Capacity: demoBlocks, BlockSize: demoBlockSize})
	if err != nil {
		return nil, err
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p, err := simulator.NewPublisher(simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{Replay: "tcp://127.0.0.1:*"}})
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	b := &backend{name: name, publisher: p, listener: l, held: held, pool: pool, served: make(chan error, 1)}
	b.server = &http.Server{Handler: b, ReadHeaderTimeout: 10 * time.Second}
	go func() { b.served <- b.server.Serve(l) }()
	return b, nil
}

func (b *backend) close() error {
	err := b.server.Close()
	if end := <-b.served; !errors.Is(end, http.ErrServerClosed) {
		err = errors.Join(err, end)
	}
	return errors.Join(err, b.publisher.Close())
}

// ServeHTTP returns an empty completion for a prompt of token ids, and the number of cached tokens.
func (b *backend) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	var c struct {
		Prompt []uint32 `json:"prompt"`
	}
	if err := json.NewDecoder(req.Body).Decode(&c); err != nil {
		http.Error(w, fmt.Sprintf("read request: %v; want a prompt of token ids", err), http.StatusBadRequest)
		return
	}
	if b.held != nil {
		release := make(chan struct{})
		select {
		case b.held <- release:
		case <-req.Context().Done():
			return
		}
		<-release
	}
	cached, err := b.compute(c.Prompt)
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = fmt.Fprintf(w, `{"object": "text_completion", "choices": [{"index": 0, "text": "", "finish_reason": "length"}], `+
		`"usage": {"prompt_tokens": %d, "prompt_tokens_details": {"cached_tokens": %d}}}`+"\n", len(c.Prompt), cached)
}

// compute stores the blocks of a prompt in the pool, publishes the changes, and returns the number of cached tokens.
func (b *backend) compute(prompt []uint32) (cached uint64, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	before := b.pool.Stats().HitTokens
	events, ok := b.pool.Request(prompt)
	if !ok {
		return 0, errors.New("the prompt does not fit into the cache")
	}
	if len(events) > 0 {
		if _, err := b.publisher.Publish(events...); err != nil {
			return 0, err
		}
	}
	return b.pool.Stats().HitTokens - before, nil
}

func (b *backend) stats() blockpool.Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.pool.Stats()
}

func (b *backend) digest() client.BlocksDigest {
	b.mu.Lock()
	defer b.mu.Unlock()
	return client.BlocksDigest{Blocks: uint64(b.pool.Len()), XOR: b.pool.Digest()}
}
