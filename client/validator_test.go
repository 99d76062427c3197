package client_test

import (
	"errors"
	"testing"
	"testing/synctest"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// messages are the messages of a stream.
type messages = []*kvcastv1.SubscribeResponse

// violations are streams whose last message violates the contract.
var violations = []struct {
	name   string
	filter *kvcastv1.Filter
	stream messages
}{
	{"no Accepted", nil, messages{two()}},
	{"a second Accepted", nil, earliest(two(), resumed(2))},
	{"an Accepted with another start", nil, messages{resumed(0)}},
	{"an Accepted without an epoch", nil, messages{{Accepted: &kvcastv1.Accepted{Mode: kvcastv1.Accepted_MODE_EARLIEST}}}},
	{"an Accepted with a position of another epoch", nil, messages{{
		Accepted: &kvcastv1.Accepted{Epoch: "other", Mode: kvcastv1.Accepted_MODE_EARLIEST}, Position: at(0),
	}}},
	{"a missing message", nil, earliest(two(), message(3, entryOf(4, "w", store(4, 8))))},
	{"a duplicate message", nil, earliest(two(), two())},
	{"a missing entry", nil, earliest(two(), message(2, entryOf(4, "w", store(3, 8))))},
	{"a missing entry within a message", nil, earliest(message(0, entryOf(1, "w", workerAdded(1)), entryOf(3, "w", store(2, 7))))},
	{"a duplicate entry", nil, earliest(message(0, entryOf(1, "w", workerAdded(1)), entryOf(1, "w", workerAdded(1))))},
	{"an entry of an earlier message", nil, earliest(two(), &kvcastv1.SubscribeResponse{
		Entries: []*kvcastv1.Entry{entryOf(2, "w", store(3, 8))}, Position: at(2), PrevSeq: 2,
	})},
	{"a missing event", nil, earliest(two(), message(2, entryOf(3, "w", store(4, 8))))},
	{"a duplicate event", nil, earliest(two(), message(2, entryOf(3, "w", store(2, 8))))},
	{"a duplicate event within an entry", nil, earliest(two(), message(2, entryOf(3, "w", store(3, 8), store(3, 9))))},
	{"a worker that was not added", nil, earliest(two(), message(2, entryOf(3, "x", store(1, 8))))},
	{"a worker that was removed", nil, earliest(two(), message(2, entryOf(3, "w", workerRemoved(3)), entryOf(4, "w", store(4, 8))))},
	{"a worker added with an old event", nil, earliest(two(), message(2, entryOf(3, "w", workerAdded(1))))},
	{"a position beyond the last entry", nil, earliest(two(), &kvcastv1.SubscribeResponse{
		Entries: []*kvcastv1.Entry{entryOf(3, "w", store(3, 8))}, Position: at(4), PrevSeq: 2,
	})},
	{"a position before the last entry", &kvcastv1.Filter{Workers: []string{"w"}}, earliest(two(), &kvcastv1.SubscribeResponse{
		Entries: []*kvcastv1.Entry{entryOf(5, "w", store(3, 8))}, Position: at(4), PrevSeq: 2,
	})},
	{"Progress beyond the last entry", nil, earliest(two(), &kvcastv1.SubscribeResponse{Progress: &kvcastv1.Progress{}, Position: at(3), PrevSeq: 2})},
	{"Progress of another epoch", nil, earliest(two(), &kvcastv1.SubscribeResponse{
		Progress: &kvcastv1.Progress{}, Position: &kvcastv1.Position{Epoch: "other", Seq: 2}, PrevSeq: 2,
	})},
	{"a missing event, with a filter by worker", &kvcastv1.Filter{Workers: []string{"w"}}, earliest(two(), message(2, entryOf(9, "w", store(4, 8))))},
	{"a missing message, with a filter by tier", &kvcastv1.Filter{Tiers: []kvcastv1.Tier{1}}, earliest(two(), message(5, entryOf(9, "w", store(4, 8))))},
	{"the end of a snapshot that did not begin", nil, earliest(two(), snapshot(2)[4])},
	{"blocks of a snapshot that did not begin", nil, earliest(two(), snapshot(2)[3])},
	{"a snapshot of another epoch", nil, earliest(two(), &kvcastv1.SubscribeResponse{SnapshotBegin: &kvcastv1.SnapshotBegin{Epoch: "other"}})},
	{"a snapshot with a worker twice", nil, earliest(two(), snapshot(2)[1], snapshot(2)[2], snapshot(2)[2])},
	{"a snapshot with an entry twice", nil, earliest(two(), snapshot(2)[1], snapshot(2)[2],
		&kvcastv1.SubscribeResponse{Entries: []*kvcastv1.Entry{entryOf(3, "w", store(4, 8)), entryOf(3, "w", store(4, 8))}})},
	{"a snapshot with a missing event", nil, earliest(two(), snapshot(2)[1], snapshot(2)[2],
		&kvcastv1.SubscribeResponse{Entries: []*kvcastv1.Entry{entryOf(3, "w", store(5, 8))}})},
	{"a snapshot that ends before its entry", nil, earliest(two(), snapshot(2)[1], snapshot(2)[2],
		&kvcastv1.SubscribeResponse{Entries: []*kvcastv1.Entry{entryOf(3, "w", store(4, 8))}}, snapshot(2)[4])},
	{"a snapshot that ends in another epoch", nil, earliest(two(), snapshot(2)[1], &kvcastv1.SubscribeResponse{
		SnapshotEnd: &kvcastv1.SnapshotEnd{}, Position: &kvcastv1.Position{Epoch: "other"},
	})},
	{"entries with an Accepted", nil, messages{joined(accepted(kvcastv1.Accepted_MODE_EARLIEST, 0), two())}},
	{"entries with an Accepted before a snapshot", nil, messages{joined(announced(), two())}},
	{"a worker with an Accepted", nil, messages{joined(announced(), snapshot(2)[2])}},
	{"blocks with an Accepted", nil, messages{joined(announced(), snapshot(2)[3])}},
	{"Progress with an Accepted", nil, messages{joined(accepted(kvcastv1.Accepted_MODE_EARLIEST, 0), heartbeat())}},
	{"a snapshot's begin with an Accepted", nil, messages{joined(announced(), snapshot(2)[1])}},
	{"a snapshot's end with an Accepted", nil, messages{joined(accepted(kvcastv1.Accepted_MODE_EARLIEST, 0), snapshot(0)[4])}},
	{"entries with a snapshot's begin", nil, earliest(two(), joined(snapshot(2)[1], entriesWithin()))},
	{"a worker with a snapshot's begin", nil, earliest(two(), joined(snapshot(2)[1], snapshot(2)[2]))},
	{"blocks with a snapshot's begin", nil, earliest(two(), joined(snapshot(2)[1], snapshot(2)[3]))},
	{"Progress with a snapshot's begin", nil, earliest(two(), joined(snapshot(2)[1], heartbeat()))},
	{"a snapshot's end with its begin", nil, earliest(two(), joined(snapshot(2)[1], snapshot(2)[4]))},
	{"entries with a snapshot's end", nil, earliest(two(), snapshot(3)[1], snapshot(3)[2], joined(entriesWithin(), snapshot(3)[4]))},
	{"a worker with a snapshot's end", nil, earliest(two(), snapshot(2)[1], joined(snapshot(2)[2], snapshot(2)[4]))},
	{"blocks with a snapshot's end", nil, earliest(two(), snapshot(2)[1], snapshot(2)[2], joined(snapshot(2)[3], snapshot(2)[4]))},
	{"Progress with a snapshot's end", nil, earliest(two(), snapshot(2)[1], joined(heartbeat(), snapshot(2)[4]))},
	{"a heartbeat outside a snapshot", nil, earliest(two(), heartbeat())},
	{"a heartbeat after a snapshot", nil, earliest(append(snapshot(2)[1:5], heartbeat())...)},
	{"a heartbeat with a position within a snapshot", nil, earliest(two(), snapshot(2)[1], progress(2))},
	{"a heartbeat with a prev_seq within a snapshot", nil, earliest(two(), snapshot(2)[1], &kvcastv1.SubscribeResponse{
		Progress: &kvcastv1.Progress{}, PrevSeq: 2,
	})},
	{"a heartbeat with entries within a snapshot", nil, earliest(two(), snapshot(2)[1], snapshot(2)[2], joined(entriesWithin(), heartbeat()))},
	{"a missing event after a snapshot", nil, earliest(append(snapshot(2)[1:5], message(2, entryOf(3, "w", store(5, 8))))...)},
}

// joined merges messages into one.
func joined(m ...*kvcastv1.SubscribeResponse) *kvcastv1.SubscribeResponse {
	one := &kvcastv1.SubscribeResponse{}
	for _, m := range m {
		proto.Merge(one, m)
	}
	return one
}

// entriesWithin returns a message with an entry of worker w without a position, as within a snapshot.
func entriesWithin() *kvcastv1.SubscribeResponse {
	return &kvcastv1.SubscribeResponse{Entries: []*kvcastv1.Entry{entryOf(3, "w", store(4, 8))}}
}

func TestViolationsAreNotDelivered(t *testing.T) {
	for _, tt := range violations {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := play(t, script{messages: tt.stream}, script{messages: snapshot(9)})
				o := s.collect(t.Context(), client.Config{Start: client.FromEarliest(), Filter: tt.filter}, func(o *outcome) bool {
					return len(o.interruptions) > 0 && o.updates[len(o.updates)-1].Message != nil
				})
				for _, u := range o.updates {
					if u.Interruption != nil && !u.Position.IsZero() {
						t.Errorf("an interruption by a violation has the position %v", u.Position)
					}
				}
				if o.err != nil || len(o.interruptions) != 1 {
					t.Fatalf("error %v, interruptions %v", o.err, o.interruptions)
				}
				delivered := 0
				for o.updates[delivered].Interruption == nil {
					delivered++
				}
				var v *client.ViolationError
				if i, want := o.interruptions[0], len(tt.stream)-1; !errors.As(i.Err, &v) || !i.Snapshot || delivered != want {
					t.Errorf("got %v after %d updates, want a violation after %d", i.Err, delivered, want)
				}
				if got := s.requests()[1]; got.GetSnapshot() == nil {
					t.Errorf("next request: got %v, want a snapshot", got)
				}
			})
			synctest.Test(t, func(t *testing.T) {
				s := play(t, script{messages: tt.stream})
				o := s.collect(t.Context(), client.Config{Start: client.FromEarliest(), Filter: tt.filter, GapPolicy: client.GapFail}, interrupted(1))
				var v *client.ViolationError
				if !errors.As(o.err, &v) || len(s.requests()) != 1 {
					t.Errorf("with GapFail: got %v, want a violation", o.err)
				}
			})
		})
	}
}

// unknownKind returns a message that has only a field of a later version of the contract.
func unknownKind() *kvcastv1.SubscribeResponse {
	m := &kvcastv1.SubscribeResponse{}
	m.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 99, protowire.VarintType), 1))
	return m
}

// TestValidStreams delivers streams without violations, such as filtered streams with holes.
func TestValidStreams(t *testing.T) {
	for _, tt := range []struct {
		name   string
		filter *kvcastv1.Filter
		stream messages
	}{
		{"no filter", nil, earliest(two(), message(2, entryOf(3, "x", workerAdded(5)), entryOf(4, "x", store(6, 1))), progress(4))},
		{"a worker added again", nil, earliest(two(), message(2, entryOf(3, "w", workerRemoved(3)), entryOf(4, "w", workerAdded(9)), entryOf(5, "w", store(10, 1))))},
		{"filter by worker", &kvcastv1.Filter{Workers: []string{"w"}}, earliest(two(), message(2, entryOf(9, "w", store(3, 8))))},
		{"filter by tier", &kvcastv1.Filter{Tiers: []kvcastv1.Tier{1}}, earliest(two(), message(2, entryOf(9, "w", store(7, 8), store(9, 9))))},
		{"filter by model", &kvcastv1.Filter{Models: []string{"m"}}, earliest(two(), message(2, entryOf(9, "w", workerAdded(7))))},
		{"Progress after excluded entries", &kvcastv1.Filter{Workers: []string{"w"}}, earliest(two(),
			&kvcastv1.SubscribeResponse{Progress: &kvcastv1.Progress{}, Position: at(50), PrevSeq: 2}, message(50, entryOf(51, "w", store(3, 8))))},
		{"a snapshot that begins twice", nil, earliest(two(), snapshot(3)[1], snapshot(3)[2], snapshot(3)[1], snapshot(3)[2], snapshot(3)[3], snapshot(3)[4],
			message(3, entryOf(4, "w", store(4, 1))))},
		{"a worker removed within a snapshot", nil, earliest(two(), snapshot(3)[1],
			&kvcastv1.SubscribeResponse{Entries: []*kvcastv1.Entry{entryOf(2, "x", workerRemoved(8))}}, snapshot(3)[4])},
		{"heartbeats of a waiting snapshot", nil, earliest(two(), snapshot(3)[1], heartbeat(), snapshot(3)[2], heartbeat(), snapshot(3)[1], heartbeat(),
			snapshot(3)[2], snapshot(3)[3], heartbeat(), snapshot(3)[4], message(3, entryOf(4, "w", store(4, 1))))},
		{"messages of a later version", nil, earliest(two(), unknownKind(), message(2, entryOf(3, "w", store(3, 1))), snapshot(4)[1], unknownKind(), snapshot(4)[4])},
		{"a message with only a position", nil, earliest(two(), &kvcastv1.SubscribeResponse{Position: at(2), PrevSeq: 2})},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := play(t, script{messages: tt.stream})
				o := s.collect(t.Context(), client.Config{Start: client.FromEarliest(), Filter: tt.filter}, func(o *outcome) bool {
					return len(o.updates) == len(tt.stream) || len(o.interruptions) > 0
				})
				if o.err != nil || len(o.interruptions) > 0 {
					t.Fatalf("error %v, interruptions %+v", o.err, o.interruptions)
				}
				for i, u := range o.updates {
					if !proto.Equal(u.Message, tt.stream[i]) {
						t.Errorf("update %d: got %v, want %v", i, u.Message, tt.stream[i])
					}
				}
			})
		})
	}
}
