package demo

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/simulator"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

// router checks each message that it receives, and keeps the entries.
type router struct {
	client  kvcastv1.RouterEventServiceClient
	checker *checker.Checker
	entries []*kvcastv1.Entry

	stream kvcastv1.RouterEventService_SubscribeClient
	cancel context.CancelFunc
}

func newRouter(client kvcastv1.RouterEventServiceClient) *router {
	return &router{client: client, checker: checker.New(checker.Options{})}
}

// connect subscribes: first from the earliest entry, later after the last position.
func (r *router) connect(ctx context.Context) error {
	req := &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}}}
	if at := r.checker.Position(); at != nil {
		req.Start = &kvcastv1.SubscribeRequest_After{After: at}
	}
	ctx, r.cancel = context.WithCancel(ctx)
	var err error
	if r.stream, err = r.client.Subscribe(ctx, req); err != nil {
		return fmt.Errorf("subscribe: %w", err)
	}
	return r.checker.Begin(req)
}

func (r *router) disconnect() { r.cancel() }

// receiveUntil receives messages until done returns true. It calls show for each entry, unless show is nil.
func (r *router) receiveUntil(done func() bool, show func(*kvcastv1.Entry) error) error {
	for !done() {
		m, err := r.stream.Recv()
		if err != nil {
			return fmt.Errorf("receive at seq %d: %w", r.seq(), err)
		}
		if err := r.checker.Receive(m); err != nil {
			return err
		}
		for _, e := range m.GetEntries() {
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

func (r *router) seq() uint64 { return r.checker.Position().GetSeq() }

// complete returns an error unless the router received as many entries as its position says, and the checker accepted all
// messages: entries are contiguous and in order.
func (r *router) complete() error {
	if got := uint64(len(r.entries)); got != r.seq() {
		return fmt.Errorf("%d entries at position %d", got, r.seq())
	}
	return r.checker.Err()
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

// matches returns an error unless the router's view equals the engines' caches.
func (r *router) matches(engines []simulator.Summary) error {
	for i, want := range engines {
		blocks := r.checker.View().Count(engineName(i), 0, kvcastv1.Tier_TIER_DEVICE)
		digest := r.checker.View().Digest(engineName(i), 0, kvcastv1.Tier_TIER_DEVICE)
		if blocks != want.Blocks || digest != want.Digest {
			return fmt.Errorf("%s: the view has %d blocks with digest %016x, the engine %d with %016x",
				engineName(i), blocks, digest, want.Blocks, want.Digest)
		}
	}
	return nil
}
