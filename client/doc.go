// Package client is what a router written in Go imports: a server's stream as an
// iterator that mends itself, and the view of all caches that comes of it.
//
// What flows in is the Subscribe streams of kvcast.v1, one after the other; what
// flows out is updates, each with the position to resume from once it has been
// applied. The guarantee: since the last SnapshotBegin every entry came once and in
// order, over any number of streams, or the caller is told why not and a snapshot
// follows. A stream that ends, stands still or is not what the contract says is
// replaced by another one, which goes on where the last one stood.
//
//	c, err := client.New("kvcast:50051", grpc.WithTransportCredentials(insecure.NewCredentials()))
//	...
//	view := client.NewView()
//	go func() { done <- view.Follow(c.Subscribe(ctx, client.Config{})) }()
//	...
//	for _, m := range view.Match(client.Prompt{Model: "m", Tokens: tokens}) {
//		// m.Worker has the first m.Blocks blocks of the prompt.
//	}
//
// A caller with a state of its own ranges over Subscribe instead. It discards its
// state at each SnapshotBegin, and stores a position only with what was applied up
// to it: between SnapshotBegin and SnapshotEnd what it holds is not whole, and
// updates have no position.
//
// The package needs neither cgo nor libzmq.
package client
