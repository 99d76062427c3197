package main

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

// follower is a router of the demo: it keeps every entry that it receives, and
// has each message checked.
type follower struct {
	client  kvcastv1.RouterEventServiceClient
	checker *checker.Checker
	entries []*kvcastv1.Entry

	stream kvcastv1.RouterEventService_SubscribeClient
	cancel context.CancelFunc
}

func newFollower(client kvcastv1.RouterEventServiceClient) *follower {
	return &follower{client: client, checker: checker.New(checker.Options{})}
}

// begin subscribes: from the earliest entry at first, after the position reached
// from then on.
func (f *follower) begin(ctx context.Context) error {
	req := &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}}}
	if at := f.checker.Position(); at != nil {
		req.Start = &kvcastv1.SubscribeRequest_After{After: at}
	}
	ctx, f.cancel = context.WithCancel(ctx)
	var err error
	if f.stream, err = f.client.Subscribe(ctx, req); err != nil {
		return fmt.Errorf("subscribe: %w", err)
	}
	return f.checker.Begin(req)
}

// end leaves the stream.
func (f *follower) end() { f.cancel() }

// until receives until enough has come, and shows each entry.
func (f *follower) until(enough func() bool, show func(*kvcastv1.Entry) error) error {
	for !enough() {
		m, err := f.stream.Recv()
		if err != nil {
			return fmt.Errorf("receive at seq %d: %w", f.seq(), err)
		}
		if err := f.checker.Receive(m); err != nil {
			return err
		}
		for _, e := range m.GetEntries() {
			f.entries = append(f.entries, e)
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

func (f *follower) seq() uint64 { return f.checker.Position().GetSeq() }

// complete tells whether entries 1 to the position are there, each once and in
// order, and nothing else was wrong with the streams.
func (f *follower) complete() error {
	for i, e := range f.entries {
		if want := uint64(i + 1); e.GetSeq() != want {
			return fmt.Errorf("entry %d stands where %d should", e.GetSeq(), want)
		}
	}
	if got := uint64(len(f.entries)); got != f.seq() {
		return fmt.Errorf("%d entries at position %d", got, f.seq())
	}
	return f.checker.Err()
}

// same tells whether another follower received the same entries.
func (f *follower) same(other *follower) error {
	if len(other.entries) < len(f.entries) {
		return fmt.Errorf("%d entries, the other has %d", len(f.entries), len(other.entries))
	}
	for i, e := range f.entries {
		if !proto.Equal(e, other.entries[i]) {
			return fmt.Errorf("entry %d is another one", e.GetSeq())
		}
	}
	return nil
}

// holds tells whether the view is what the engines hold.
func (f *follower) holds(engines []engineEnded) error {
	if len(engines) == 0 {
		return errors.New("no engine has told what it holds")
	}
	for _, e := range engines {
		blocks := f.checker.View().Count(e.Engine, 0, kvcastv1.Tier_TIER_DEVICE)
		digest := f.checker.View().Digest(e.Engine, 0, kvcastv1.Tier_TIER_DEVICE)
		if blocks != e.Blocks || digest != e.Digest {
			return fmt.Errorf("of %s it holds %d blocks with digest %016x, the engine %d with %016x",
				e.Engine, blocks, digest, e.Blocks, e.Digest)
		}
	}
	return nil
}
