package index_test

import (
	"context"
	"testing"

	"github.com/kvcast/kvcast/internal/core/index"
)

// turnCounter is a context that Sharing asks before each turn.
type turnCounter struct {
	context.Context
	turn func()
}

func (c turnCounter) Err() error {
	c.turn()
	return c.Context.Err()
}

// TestSharingTakesTurns applies an entry before each turn of Sharing. The index has few blocks, but so many shared nodes that they
// are not resolved in one turn.
func TestSharingTakesTurns(t *testing.T) {
	t.Parallel()
	const prompts, nodes = 1000, 2000
	x := index.New()
	for rank := range uint32(2) {
		for n := range uint64(prompts) {
			x.ApplyEntry(entryOf(uint64(rank)*prompts+n+1, event(rank, stored(n))))
		}
	}
	turns := 0
	count := turnCounter{t.Context(), func() {
		turns++
		x.ApplyEntry(entryOf(uint64(2*prompts+turns), event(2, stored(0)))) // waits forever if Sharing has a lock
	}}
	got, err := x.Sharing(count, "m", nodes)
	if err != nil || len(got.Nodes) != prompts {
		t.Fatalf("got %d nodes, %v; want %d", len(got.Nodes), err, prompts)
	}
	// The work of linking 1,000 nodes is that of some turns, and there is one turn at least for counting blocks.
	if turns < 4 {
		t.Errorf("%d turns, want at least 4", turns)
	}
}
