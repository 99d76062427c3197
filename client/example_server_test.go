package client_test

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// kvcast is a server in this process, instead of `kvcast serve`. It has no engines: an example publishes their batches. It implements
// what the examples call.
type kvcast struct {
	kvcastv1.UnimplementedRouterEventServiceServer
	Addr   string
	server *grpc.Server
	served chan error

	mu       sync.Mutex        // guards all below
	entries  []*kvcastv1.Entry // entry i has seq i+1
	eventIDs map[string]uint64 // of the last events, by worker
	appended chan struct{}     // closed by the next entry
}

func startKvcast() *kvcast {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	k := &kvcast{
		Addr: l.Addr().String(), server: grpc.NewServer(), served: make(chan error, 1),
		eventIDs: make(map[string]uint64), appended: make(chan struct{}),
	}
	kvcastv1.RegisterRouterEventServiceServer(k.server, k)
	go func() { k.served <- k.server.Serve(l) }()
	return k
}

func (k *kvcast) Stop() {
	k.server.Stop()
	if err := <-k.served; err != nil {
		log.Fatal(err)
	}
}

// Engine adds a worker and returns a function that publishes a batch.
func (k *kvcast) Engine(name string) func(...*kvcastv1.RouterEvent) {
	publish := func(events ...*kvcastv1.RouterEvent) { k.append(name, events) }
	publish(&kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerAdded{
		WorkerAdded: &kvcastv1.WorkerAdded{Model: "m", BlockSize: 4, Endpoint: name + ":8000"},
	}})
	return publish
}

// append appends an entry with the events of a batch.
func (k *kvcast) append(worker string, events []*kvcastv1.RouterEvent) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, ev := range events {
		k.eventIDs[worker]++
		ev.EventId = k.eventIDs[worker]
	}
	k.entries = append(k.entries, entryOf(uint64(len(k.entries)+1), worker, events...))
	close(k.appended)
	k.appended = make(chan struct{})
}

// after returns the entries after a seq, and a channel that the next entry closes.
func (k *kvcast) after(seq uint64) ([]*kvcastv1.Entry, <-chan struct{}) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.entries[seq:], k.appended
}

// Subscribe implements kvcastv1.RouterEventServiceServer: it resumes after a position, or starts with a snapshot.
func (k *kvcast) Subscribe(req *kvcastv1.SubscribeRequest, stream grpc.ServerStreamingServer[kvcastv1.SubscribeResponse]) error {
	seq := req.GetAfter().GetSeq()
	first := []*kvcastv1.SubscribeResponse{resumed(seq)}
	if req.GetAfter() == nil {
		entries, _ := k.after(0)
		seq, first = uint64(len(entries)), snapshotOf(entries)
	}
	for _, m := range first {
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	for {
		entries, appended := k.after(seq)
		for _, e := range entries {
			if err := stream.Send(message(seq, e)); err != nil {
				return err
			}
			seq = e.GetSeq()
		}
		select {
		case <-appended:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// snapshotOf returns the messages of a snapshot of entries that only add workers and store blocks.
func snapshotOf(entries []*kvcastv1.Entry) []*kvcastv1.SubscribeResponse {
	workers, blocks := []*kvcastv1.SubscribeResponse(nil), []*kvcastv1.SubscribeResponse(nil)
	byName := make(map[string]*kvcastv1.SnapshotWorker)
	for _, e := range entries {
		for _, ev := range e.GetEvents() {
			if added := ev.GetWorkerAdded(); added != nil {
				byName[e.GetWorker()] = &kvcastv1.SnapshotWorker{Worker: e.GetWorker(), Added: added}
				workers = append(workers, &kvcastv1.SubscribeResponse{SnapshotWorker: byName[e.GetWorker()]})
			} else {
				stored := &kvcastv1.SnapshotBlocks{Worker: e.GetWorker(), Events: []*kvcastv1.RouterEvent{ev}}
				blocks = append(blocks, &kvcastv1.SubscribeResponse{SnapshotBlocks: []*kvcastv1.SnapshotBlocks{stored}})
			}
			byName[e.GetWorker()].LastEventId = ev.GetEventId()
		}
	}
	end := at(uint64(len(entries)))
	all := []*kvcastv1.SubscribeResponse{announced(), {SnapshotBegin: &kvcastv1.SnapshotBegin{Epoch: end.GetEpoch()}}}
	all = append(append(all, workers...), blocks...)
	return append(all, &kvcastv1.SubscribeResponse{SnapshotEnd: &kvcastv1.SnapshotEnd{Position: end}, Position: end, PrevSeq: end.GetSeq()})
}

// MatchPrefixes implements kvcastv1.RouterEventServiceServer.
func (k *kvcast) MatchPrefixes(stream grpc.BidiStreamingServer[kvcastv1.MatchPrefixesRequest, kvcastv1.MatchPrefixesResponse]) error {
	for {
		req, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		all, _ := k.after(0)
		view := startedView()
		view.Apply(entries(all...))
		res := &kvcastv1.MatchPrefixResponse{Position: at(uint64(len(all)))}
		for _, p := range req.GetRequest().GetPrompts() {
			found := &kvcastv1.PromptMatches{}
			for _, m := range view.Match(client.Prompt{Model: req.GetRequest().GetModel(), Tokens: p.GetTokenIds()}) {
				found.Matches = append(found.Matches, &kvcastv1.PrefixMatch{
					Worker: m.Worker, Endpoint: m.Endpoint, Blocks: uint32(m.Blocks), Tokens: uint32(m.Tokens), Trust: m.Trust,
				})
			}
			res.Prompts = append(res.Prompts, found)
		}
		if err := stream.Send(&kvcastv1.MatchPrefixesResponse{Id: req.GetId(), Response: res}); err != nil {
			return err
		}
	}
}

// prompt returns an event that stores the blocks of a prompt with 4 tokens per block. The block hashes are name, name+1
// and so on.
func prompt(name uint64, tokens ...uint32) *kvcastv1.RouterEvent {
	stored := &kvcastv1.Stored{BlockSize: 4, TokensHashes: client.TokensHashes(tokens, 4, "", "")}
	for i := range stored.TokensHashes {
		stored.BlockHashes = append(stored.BlockHashes, name+uint64(i))
	}
	return &kvcastv1.RouterEvent{
		DpRank: proto.Uint32(0), Tier: kvcastv1.Tier_TIER_DEVICE, Event: &kvcastv1.RouterEvent_Stored{Stored: stored},
	}
}
