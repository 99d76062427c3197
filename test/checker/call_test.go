package checker_test

import (
	"testing"

	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

// replayed returns a Replay of entries 2 to 4 of goodStreams, and its request.
func replayed() (*kvcastv1.ReplayRequest, []*kvcastv1.ReplayResponse) {
	e := goodStreams()[0].msgs
	return &kvcastv1.ReplayRequest{After: at(1), Until: at(4)}, []*kvcastv1.ReplayResponse{
		{Accepted: accepted(kvcastv1.Accepted_MODE_RESUME, 1, 9).Accepted, Position: at(1)},
		{Entries: e[1].Entries[1:], Position: at(3), PrevSeq: 1},
		{Entries: e[2].Entries, Position: at(4), PrevSeq: 3},
	}
}

func playReplay(t *testing.T, c *checker.Checker, req *kvcastv1.ReplayRequest, msgs []*kvcastv1.ReplayResponse) error {
	t.Helper()
	if err := c.BeginReplay(req); err != nil {
		t.Fatalf("BeginReplay(%v): %v", req, err)
	}
	for _, m := range msgs {
		if err := c.ReceiveReplay(m); err != nil {
			return err
		}
	}
	return c.EndReplay()
}

func TestReplays(t *testing.T) {
	type msgs = []*kvcastv1.ReplayResponse
	tests := []struct {
		name  string
		want  checker.Property
		spoil func(req *kvcastv1.ReplayRequest, m msgs) msgs
	}{
		{"good", "", func(_ *kvcastv1.ReplayRequest, m msgs) msgs { return m }},
		{"until the newest", "", func(req *kvcastv1.ReplayRequest, m msgs) msgs {
			req.Until, m[0].Accepted.NewestSeq = nil, 4
			return m
		}},
		{"from the oldest", "", func(req *kvcastv1.ReplayRequest, m msgs) msgs {
			req.After, m[0].Accepted.Mode, m[0].Accepted.OldestSeq = nil, kvcastv1.Accepted_MODE_EARLIEST, 2
			return m
		}},
		{"empty", "", func(req *kvcastv1.ReplayRequest, m msgs) msgs {
			req.Until.Seq = 1
			return m[:1]
		}},
		{"filtered", "", func(req *kvcastv1.ReplayRequest, m msgs) msgs {
			req.Filter = &kvcastv1.Filter{Workers: []string{"a"}}
			m[1].Entries = m[1].Entries[:1]
			m[2].Entries = nil
			return m
		}},
		{"filtered, and short of a position", checker.GapFree, func(req *kvcastv1.ReplayRequest, m msgs) msgs {
			req.Filter = &kvcastv1.Filter{Workers: []string{"a"}}
			m[1].Entries = m[1].Entries[:1]
			return m[:2]
		}},
		{"short", checker.GapFree, func(_ *kvcastv1.ReplayRequest, m msgs) msgs { return m[:2] }},
		{"short of the newest", checker.GapFree, func(req *kvcastv1.ReplayRequest, m msgs) msgs {
			req.Until = nil
			return m
		}},
		{"without an Accepted", checker.Protocol, func(_ *kvcastv1.ReplayRequest, _ msgs) msgs { return nil }},
		{"an entry too many", checker.Filtered, func(req *kvcastv1.ReplayRequest, m msgs) msgs {
			req.Until.Seq = 3
			return m
		}},
		{"a position too far", checker.Progress, func(req *kvcastv1.ReplayRequest, m msgs) msgs {
			req.Filter = &kvcastv1.Filter{Workers: []string{"a", "b"}}
			m[2].Position.Seq = 5
			return m
		}},
		{"a position alone, ahead", checker.Progress, func(_ *kvcastv1.ReplayRequest, m msgs) msgs {
			m[2].Entries = nil
			return m
		}},
		{"an entry missing", checker.GapFree, func(_ *kvcastv1.ReplayRequest, m msgs) msgs {
			m[1].Entries = m[1].Entries[1:]
			return m
		}},
		{"starts elsewhere", checker.GapFree, func(_ *kvcastv1.ReplayRequest, m msgs) msgs {
			m[0].Position.Seq = 0
			return m
		}},
		{"starts with a snapshot", checker.Protocol, func(_ *kvcastv1.ReplayRequest, m msgs) msgs {
			m[0].Accepted = announced(3, 9).Accepted
			return m
		}},
		{"starts after its end", checker.Protocol, func(req *kvcastv1.ReplayRequest, m msgs) msgs {
			req.After, m[0].Accepted.Mode, m[0].Accepted.OldestSeq = nil, kvcastv1.Accepted_MODE_EARLIEST, 6
			m[0].Position.Seq = 5
			return m
		}},
		{"until another epoch", checker.Protocol, func(req *kvcastv1.ReplayRequest, m msgs) msgs {
			req.Until.Epoch = "e2"
			return m
		}},
		{"an empty message", checker.Protocol, func(_ *kvcastv1.ReplayRequest, m msgs) msgs {
			m[2] = &kvcastv1.ReplayResponse{}
			return m
		}},
		{"a nil message", checker.Protocol, func(_ *kvcastv1.ReplayRequest, m msgs) msgs {
			m[2] = nil
			return m
		}},
		{"progress", checker.Protocol, func(_ *kvcastv1.ReplayRequest, m msgs) msgs {
			// The encodings are the same; the contract has no progress here.
			m[2] = &kvcastv1.ReplayResponse{}
			if err := unmarshalAs(progress(3, 3), m[2]); err != nil {
				panic(err)
			}
			return m
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			req, m := replayed()
			m = tt.spoil(req, m)
			c := checker.New(checker.Options{})
			wantProperty(t, playReplay(t, c, req, m), tt.want)
			if tt.want == "" && c.EndReplay() == nil {
				t.Error("EndReplay twice: no error")
			}
		})
	}
}

// unmarshalAs decodes one message type as another.
func unmarshalAs(from, to proto.Message) error {
	b, err := proto.Marshal(from)
	if err != nil {
		return err
	}
	return proto.Unmarshal(b, to)
}

func TestReplayContinuesAStream(t *testing.T) {
	streams := goodStreams()
	c, err := play(t, streams[:1])
	wantProperty(t, err, "")
	var msgs []*kvcastv1.ReplayResponse
	for _, m := range streams[1].msgs {
		msgs = append(msgs, &kvcastv1.ReplayResponse{
			Entries: m.Entries, Position: m.Position, PrevSeq: m.PrevSeq, Accepted: m.Accepted,
		})
	}
	for _, req := range []*kvcastv1.ReplayRequest{{}, {After: at(3)}, {After: at(4), Until: at(3)}} {
		if err := c.BeginReplay(req); err == nil {
			t.Errorf("BeginReplay(%v) after a stream up to 4: want an error", req)
		}
	}
	wantProperty(t, playReplay(t, c, &kvcastv1.ReplayRequest{After: at(4), Until: at(9)}, msgs), "")
	wantProperty(t, playOn(t, c, streams[2:]), "")
	if err := c.EndReplay(); err == nil {
		t.Error("EndReplay of a Subscribe: no error")
	}
}

// snapshotMessages returns the messages of a Snapshot, the first of snapshotStreams.
func snapshotMessages() []*kvcastv1.SnapshotResponse {
	var msgs []*kvcastv1.SnapshotResponse
	for _, m := range snapshotStreams()[0].msgs[1:10] {
		r := &kvcastv1.SnapshotResponse{}
		if err := unmarshalAs(m, r); err != nil {
			panic(err)
		}
		msgs = append(msgs, r)
	}
	return msgs
}

func playSnapshot(t *testing.T, c *checker.Checker, msgs []*kvcastv1.SnapshotResponse) error {
	t.Helper()
	if err := c.BeginSnapshot(&kvcastv1.SnapshotRequest{}); err != nil {
		t.Fatal(err)
	}
	for _, m := range msgs {
		if err := c.ReceiveSnapshot(m); err != nil {
			return err
		}
	}
	return c.EndSnapshot()
}

func TestSnapshots(t *testing.T) {
	type msgs = []*kvcastv1.SnapshotResponse
	tests := []struct {
		name  string
		want  checker.Property
		spoil func(m msgs) msgs
	}{
		{"good", "", func(m msgs) msgs { return m }},
		{"restarted", "", func(m msgs) msgs { return append(m[:5:5], snapshotMessages()...) }},
		{"empty", "", func(m msgs) msgs { return msgs{m[0], m[8]} }},
		{"no messages", checker.Snapshot, func(_ msgs) msgs { return nil }},
		{"without an end", checker.Snapshot, func(m msgs) msgs { return m[:8] }},
		{"without a begin", checker.Protocol, func(m msgs) msgs { return m[1:] }},
		{"twice", checker.Protocol, func(m msgs) msgs { return append(m, m...) }},
		{"restarted in another epoch", checker.Protocol, func(m msgs) msgs {
			again := snapshotMessages()
			again[0].SnapshotBegin.Epoch = "e2"
			return append(m[:5:5], again...)
		}},
		{"with an Accepted", checker.Protocol, func(m msgs) msgs {
			if err := unmarshalAs(announced(1, 6), m[0]); err != nil {
				panic(err)
			}
			return m
		}},
		{"a nil message", checker.Protocol, func(m msgs) msgs { return append(m[:3:3], nil) }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			wantProperty(t, playSnapshot(t, checker.New(checker.Options{}), tt.spoil(snapshotMessages())), tt.want)
		})
	}
}

func TestStreamContinuesAfterASnapshot(t *testing.T) {
	c := checker.New(checker.Options{})
	if err := c.EndSnapshot(); err == nil {
		t.Error("EndSnapshot without one: no error")
	}
	wantProperty(t, playSnapshot(t, c, snapshotMessages()), "")
	if got := c.Position(); !proto.Equal(got, at(12)) {
		t.Errorf("Position() = %v, want 12", got)
	}
	wantProperty(t, playOn(t, c, []stream{{fromAfter(12), []*kvcastv1.SubscribeResponse{
		accepted(kvcastv1.Accepted_MODE_RESUME, 12, 12), snapshotStreams()[0].msgs[10],
	}}}), "")
}
