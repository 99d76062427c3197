package demo

import (
	"context"
	"fmt"
	"iter"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/simulator"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// router applies updates to a view, and keeps the entries. The client checks each message.
type router struct {
	client  *client.Client
	view    *client.View
	at      client.Position // of the last update
	entries []*kvcastv1.Entry

	// interrupted, if not nil, is called when another stream replaces one, which otherwise is an error.
	interrupted func(*client.Interruption)

	next       func() (client.Update, error)
	disconnect func()
}

func newRouter(c *client.Client) *router { return &router{client: c, view: client.NewView()} }

// connect subscribes from a start, or after the last position.
func (r *router) connect(ctx context.Context, start client.Start) {
	if !r.at.IsZero() {
		start = client.After(r.at)
	}
	next, disconnect := iter.Pull2(r.client.Subscribe(ctx, client.Config{Start: start, GapPolicy: client.GapFail}))
	r.disconnect = disconnect
	r.next = func() (client.Update, error) {
		u, err, ok := next()
		if !ok {
			err = fmt.Errorf("subscription ended: %w", ctx.Err())
		}
		return u, err
	}
}

// receiveUntil receives updates until done returns true. It calls show for each entry, unless show is nil.
func (r *router) receiveUntil(done func() bool, show func(*kvcastv1.Entry) error) error {
	for !done() {
		u, err := r.next()
		if u.Interruption != nil && r.interrupted != nil {
			r.interrupted(u.Interruption)
			continue
		}
		if u.Interruption != nil {
			err = u.Interruption.Err
		}
		if err != nil {
			return fmt.Errorf("receive after %s: %w", r.at, err)
		}
		r.view.Apply(u)
		r.at = u.Position
		for _, e := range u.Message.GetEntries() {
			r.entries = append(r.entries, e)
			if show == nil {
				continue
			}
			if err := show(e); err != nil {
				return err
			}
		}
	}
	return nil
}

// complete returns an error unless the router received each entry up to its position once and in order.
func (r *router) complete() error {
	if got := uint64(len(r.entries)); got != r.at.Seq {
		return fmt.Errorf("%d entries at position %d", got, r.at.Seq)
	}
	for i, e := range r.entries {
		if want := uint64(i) + 1; e.GetSeq() != want {
			return fmt.Errorf("entry %d in place of %d", e.GetSeq(), want)
		}
	}
	return nil
}

// equals returns an error unless another router received the same entries.
func (r *router) equals(other *router) error {
	if len(other.entries) < len(r.entries) {
		return fmt.Errorf("%d entries, the other router has %d", len(r.entries), len(other.entries))
	}
	for i, e := range r.entries {
		if !proto.Equal(e, other.entries[i]) {
			return fmt.Errorf("entry %d differs", e.GetSeq())
		}
	}
	return nil
}

// blocks returns the digest of an engine's blocks of dp rank 0 in the device tier.
func (r *router) blocks(engine string) client.BlocksDigest {
	w, _ := r.view.Worker(engine)
	if len(w.Ranks) == 0 || w.Ranks[0].Rank != 0 {
		return client.BlocksDigest{}
	}
	return w.Ranks[0].Blocks[kvcastv1.Tier_TIER_DEVICE]
}

// matches returns an error unless the router's view equals the engines' caches: it has no other workers, and no other dp
// ranks and tiers than rank 0 and device.
func (r *router) matches(engines []simulator.Summary) error {
	workers := r.view.Workers()
	if len(workers) != len(engines) {
		return fmt.Errorf("the view has %d workers, and there are %d engines", len(workers), len(engines))
	}
	for i, e := range engines {
		name, want := engineName(i), client.BlocksDigest{Blocks: uint64(e.Blocks), XOR: e.Digest}
		if got := r.blocks(name); got != want {
			return fmt.Errorf("%s: the view has %d blocks with digest %016x, the engine %d with %016x",
				name, got.Blocks, got.XOR, want.Blocks, want.XOR)
		}
		w, _ := r.view.Worker(name)
		for _, rank := range w.Ranks {
			for tier, got := range rank.Blocks {
				isCache := rank.Rank == 0 && tier == int(kvcastv1.Tier_TIER_DEVICE)
				if !isCache && got.Blocks > 0 {
					return fmt.Errorf("%s: the view has %d blocks of dp rank %d in tier %v, the engine none",
						name, got.Blocks, rank.Rank, kvcastv1.Tier(tier))
				}
			}
		}
	}
	return nil
}
