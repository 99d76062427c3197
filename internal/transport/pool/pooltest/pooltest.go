// Package pooltest reads the Receivers of pools in tests, as package ingest does.
package pooltest

import (
	"context"
	"encoding/binary"
	"errors"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/wire"
)

// Adapter is the name of the adapter of Chain's blocks.
const Adapter = "adapter"

// Chain is the content of blocks 1 to n, each the parent of the next.
func Chain(n uint64) (all []feed.Content) {
	for hash := uint64(1); hash <= n; hash++ {
		all = append(all, feed.Content{Hash: hash, Parent: hash - 1, HasParent: hash > 1, TokensHash: 100 + hash, Tokens: 16, LoRA: Adapter})
	}
	return all
}

// Contents passes on contents of workers, and calls then, if it is not nil.
func Contents(all []feed.Content, then func(feed.Learner)) feed.Contents {
	return func(ctx context.Context, _ string, l feed.Learner) error {
		l.Stored(all, false)
		l.Begun()
		if then != nil {
			then(l)
		}
		<-ctx.Done()
		return nil
	}
}

// Reader reads what a Receiver publishes, which must be blocks of Chain, and keeps which of them are held.
type Reader struct {
	transport.Receiver
	// Held has the tokens hashes of the blocks that are held, by hash, and Gone counts those that were removed.
	Held map[uint64]uint64
	Gone int
	// Events are those of the connection.
	Events []transport.Event
	// Topic is that of all messages.
	Topic string

	t     testing.TB
	rules *wire.Rules
	seq   uint64
}

// Read returns a Reader. The test closes it.
func Read(t testing.TB, of transport.Receiver) *Reader {
	t.Helper()
	r := &Reader{t: t, Receiver: of, rules: wire.NewRules(new(wire.BlockSize)), Held: make(map[uint64]uint64)}
	r.rules.ContentInKeys = true
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// Read reads a chunk, and returns an error when nothing follows.
func (r *Reader) Read() error {
	chunk, err := r.Next(func() time.Time { return time.Time{} })
	if err != nil {
		return err
	}
	defer r.Recycle(chunk)
	r.Events = append(r.Events, chunk.Events...)
	for _, m := range chunk.Messages {
		r.message(m)
	}
	return nil
}

func (r *Reader) message(m transport.Message) {
	var decoder wire.Decoder
	batch, err := decoder.Decode(m.Frames[2])
	if err != nil {
		r.t.Fatal(err)
	}
	var counts wire.Counts
	r.rules.Admit(batch, 0, &counts)
	if counts != (wire.Counts{}) || batch.Doubts != (wire.Doubts{}) {
		r.t.Fatalf("events were left out: %v", counts)
	}
	topic, seq := string(m.Frames[0]), binary.BigEndian.Uint64(m.Frames[1])
	if r.seq++; r.Topic != "" && r.Topic != topic || r.seq != seq {
		r.t.Fatalf("topic %q and seq %d after %q and %d", topic, seq, r.Topic, r.seq-1)
	}
	r.Topic = topic
	for _, e := range batch.Events {
		for i, hash := range e.BlockHashes {
			_, isHeld := r.Held[hash]
			switch {
			case isHeld != (e.Kind == wire.KindRemoved), e.Tier != kvblock.TierExternal:
				r.t.Fatalf("kind %d of block %d in tier %d", e.Kind, hash, e.Tier)
			case e.Kind == wire.KindRemoved:
				delete(r.Held, hash)
				r.Gone++
			case e.LoRAName != Adapter || e.BlockSize != 16:
				r.t.Fatalf("%+v", e)
			default:
				r.Held[hash] = e.TokensHashes[i]
			}
		}
	}
}

// Want reads until so many first blocks of Chain are held, and no other.
func (r *Reader) Want(n uint64) {
	r.t.Helper()
	for uint64(len(r.Held)) != n {
		if err := r.Read(); err != nil {
			r.t.Fatal(err)
		}
	}
	for hash := uint64(1); hash <= n; hash++ {
		if r.Held[hash] != 100+hash {
			r.t.Fatalf("%v; want blocks 1 to %d", r.Held, n)
		}
	}
}

// Last reads until nothing follows, and returns the last event.
func (r *Reader) Last() transport.Event {
	r.t.Helper()
	for {
		if err := r.Read(); errors.Is(err, transport.ErrEnded) {
			return r.Events[len(r.Events)-1]
		} else if err != nil {
			r.t.Fatal(err)
		}
	}
}
