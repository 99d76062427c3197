package client_test

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvcast/kvcast/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// scripted is a server that plays a script per stream. It plays the last script for all further streams.
type scripted struct {
	kvcastv1.UnimplementedRouterEventServiceServer
	client   *client.Client
	listener *bufconn.Listener
	pause    time.Duration                 // before each message; set before the first stream
	match    *kvcastv1.MatchPrefixResponse // set before the first request

	mu      sync.Mutex
	streams []script
	asked   []*kvcastv1.SubscribeRequest
	at      []time.Time
}

// script has the messages of a stream and the error that ends it; nil: the stream stays open.
type script struct {
	messages []*kvcastv1.SubscribeResponse
	err      error
}

// play starts a server without a network, for tests under synctest.
func play(t *testing.T, streams ...script) *scripted {
	t.Helper()
	l := bufconn.Listen(64 << 10) // each connection has two such buffers
	s := &scripted{streams: streams, listener: l}
	g := grpc.NewServer(grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 9 * time.Second})) // as in kvcast servers
	kvcastv1.RegisterRouterEventServiceServer(g, s)
	served := make(chan error, 1)
	go func() { served <- g.Serve(l) }()
	t.Cleanup(func() {
		g.Stop()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	var err error
	s.client, err = client.New("passthrough:///bufconn", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *scripted) Subscribe(req *kvcastv1.SubscribeRequest, stream kvcastv1.RouterEventService_SubscribeServer) error {
	s.mu.Lock()
	now := s.streams[min(len(s.asked), len(s.streams)-1)]
	s.asked, s.at = append(s.asked, proto.CloneOf(req)), append(s.at, time.Now())
	s.mu.Unlock()
	for _, m := range now.messages {
		if s.pause > 0 {
			select {
			case <-time.After(s.pause):
			case <-stream.Context().Done():
				return stream.Context().Err()
			}
		}
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	if errors.Is(now.err, io.EOF) {
		return nil
	}
	if now.err != nil {
		return now.err
	}
	<-stream.Context().Done()
	return stream.Context().Err()
}

func (s *scripted) MatchPrefix(context.Context, *kvcastv1.MatchPrefixRequest) (*kvcastv1.MatchPrefixResponse, error) {
	return s.match, nil
}

// requests returns the requests that the server has received.
func (s *scripted) requests() []*kvcastv1.SubscribeRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked
}

// times returns the times at which the server has received the requests.
func (s *scripted) times() []time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.at
}

// at returns a position of epoch e, which all scripts have.
func at(seq uint64) *kvcastv1.Position { return &kvcastv1.Position{Epoch: "e", Seq: seq} }

// accepted returns the first message of a stream that starts after a seq.
func accepted(mode kvcastv1.Accepted_Mode, after uint64) *kvcastv1.SubscribeResponse {
	return &kvcastv1.SubscribeResponse{
		Accepted: &kvcastv1.Accepted{Epoch: "e", OldestSeq: 1, NewestSeq: 100, Mode: mode}, Position: at(after), PrevSeq: after,
	}
}

func resumed(after uint64) *kvcastv1.SubscribeResponse {
	return accepted(kvcastv1.Accepted_MODE_RESUME, after)
}

// announced returns the first message of a stream that starts with a snapshot.
func announced() *kvcastv1.SubscribeResponse {
	return &kvcastv1.SubscribeResponse{Accepted: &kvcastv1.Accepted{
		Epoch: "e", OldestSeq: 1, NewestSeq: 100, Mode: kvcastv1.Accepted_MODE_SNAPSHOT,
	}}
}

// snapshot returns the messages of a snapshot up to a seq. It has worker w with last_event_id 3.
func snapshot(end uint64) []*kvcastv1.SubscribeResponse {
	return []*kvcastv1.SubscribeResponse{
		announced(),
		{SnapshotBegin: &kvcastv1.SnapshotBegin{Epoch: "e"}},
		{SnapshotWorker: &kvcastv1.SnapshotWorker{Worker: "w", Added: &kvcastv1.WorkerAdded{Model: "m"}, LastEventId: 3}},
		{SnapshotBlocks: []*kvcastv1.SnapshotBlocks{{Worker: "w", Events: []*kvcastv1.RouterEvent{store(0, 7)}}}},
		{SnapshotEnd: &kvcastv1.SnapshotEnd{Position: at(end)}, Position: at(end), PrevSeq: end},
	}
}

func store(id uint64, block uint64) *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{
		EventId: id, DpRank: proto.Uint32(0), Tier: kvcastv1.Tier_TIER_DEVICE,
		Event: &kvcastv1.RouterEvent_Stored{Stored: &kvcastv1.Stored{
			BlockHashes: []uint64{block}, TokensHashes: []uint64{block}, BlockSize: 16,
		}},
	}
}

// workerAdded and workerRemoved return events about a worker.
func workerAdded(id uint64) *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{EventId: id, Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: &kvcastv1.WorkerAdded{Model: "m"}}}
}

func workerRemoved(id uint64) *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{EventId: id, Event: &kvcastv1.RouterEvent_WorkerRemoved{WorkerRemoved: &kvcastv1.WorkerRemoved{}}}
}

func entryOf(seq uint64, worker string, events ...*kvcastv1.RouterEvent) *kvcastv1.Entry {
	return &kvcastv1.Entry{Seq: seq, Worker: worker, Model: "m", Events: events}
}

// message returns a message with entries and the position of the last entry.
func message(prev uint64, e ...*kvcastv1.Entry) *kvcastv1.SubscribeResponse {
	return &kvcastv1.SubscribeResponse{Entries: e, Position: at(e[len(e)-1].GetSeq()), PrevSeq: prev}
}

func progress(seq uint64, digests ...*kvcastv1.WorkerDigest) *kvcastv1.SubscribeResponse {
	return &kvcastv1.SubscribeResponse{Progress: &kvcastv1.Progress{Workers: digests}, Position: at(seq), PrevSeq: seq}
}

// heartbeat returns Progress without a position.
func heartbeat(digests ...*kvcastv1.WorkerDigest) *kvcastv1.SubscribeResponse {
	return &kvcastv1.SubscribeResponse{Progress: &kvcastv1.Progress{Workers: digests}}
}

// refusal returns an error as a server sends it.
func refusal(code codes.Code, reason string, retry time.Duration) error {
	details := []protoadapt.MessageV1{&errdetails.ErrorInfo{
		Reason: reason, Domain: "kvcast", Metadata: map[string]string{"epoch": "e", "oldest": "5", "newest": "9"},
	}}
	if retry > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(retry)})
	}
	s, err := status.New(code, "as scripted").WithDetails(details...)
	if err != nil {
		panic(err)
	}
	return s.Err()
}

// outcome has the updates that a subscription delivered, and the error that ended it.
type outcome struct {
	updates       []client.Update
	interruptions []*client.Interruption
	err           error
}

// collect ranges over a subscription until enough returns true or the subscription ends.
func (s *scripted) collect(ctx context.Context, cfg client.Config, enough func(*outcome) bool) *outcome {
	o := &outcome{}
	for u, err := range s.client.Subscribe(ctx, cfg) {
		if err != nil {
			o.err = err
			break
		}
		o.updates = append(o.updates, u)
		if u.Interruption != nil {
			o.interruptions = append(o.interruptions, u.Interruption)
		}
		if enough(o) {
			break
		}
	}
	return o
}

// interrupted returns a condition for collect: n interruptions.
func interrupted(n int) func(*outcome) bool {
	return func(o *outcome) bool { return len(o.interruptions) == n }
}

// began returns a condition for collect: n accepted streams.
func began(n int) func(*outcome) bool {
	return func(o *outcome) bool {
		accepted := 0
		for _, u := range o.updates {
			if u.Message.GetAccepted() != nil {
				accepted++
			}
		}
		return accepted == n
	}
}
