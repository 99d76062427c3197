package jetstream_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/test/harness"
)

// TestForeignMessagesAreEntriesWithoutEvents publishes messages that are no entries, between those of an owner. All journals read them in the
// same way: one that follows, one that is opened later, and the owner, which goes on.
func TestForeignMessagesAreEntriesWithoutEvents(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	log := new(logLines)
	cfg := serverConfig(s.ClientURL())
	cfg.Log = log.logger()
	owner, _ := load(t, cfg)
	follower, _ := load(t, followConfig(s))
	want := appendN(t, owner, "w", 3)
	administer(t, s, func(js natsjs.JetStream) {
		for _, m := range []*nats.Msg{
			{Subject: "kvcast.kvcast.w"},
			{Subject: "kvcast.kvcast.w", Header: nats.Header{"Status": {"503"}}},
			{Subject: "kvcast.kvcast.w", Header: nats.Header{"Status": {"100"}}, Data: []byte("x")},
			{Subject: "kvcast.kvcast.w", Header: nats.Header{"Kvcast": {"0 0 m"}}, Data: want[0].Body},                        // without the seq that it must follow
			{Subject: "kvcast.kvcast.%77", Header: nats.Header{"Kvcast": {"0 0 m"}, natsjs.ExpectedLastSubjSeqHeader: {"0"}}}, // not as w is written
			{Subject: "kvcast.kvcast.%zz", Data: []byte("x")},
			{Subject: "kvcast.kvcast.other", Data: []byte("x")},
		} {
			if _, err := js.PublishMsg(t.Context(), m); err != nil {
				t.Fatal(err)
			}
			want = append(want, appendN(t, owner, "w", 20)...)
		}
	})
	const messages, newest = 7, 1 + 3 + 7*21
	wantSame(t, follower, owner)
	if b := owner.Bounds(); b.Newest != newest {
		t.Errorf("got %d entries, want %d: seqs must be contiguous", b.Newest, newest)
	}
	later := open(t, serverConfig(s.ClientURL()))
	var got []jetstream.Entry
	if err := later.Load(t.Context(), 0, func(e jetstream.Entry) error {
		if e.Invalid == nil && e.Owner == nil {
			got = append(got, e)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	wantEntries(t, got, want)
	wantSame(t, later, owner)
	got = nil
	if err := later.LoadWorker(t.Context(), "w", 1, newest, func(e jetstream.Entry) error {
		got = append(got, e)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	wantEntries(t, got, want)
	for name, j := range map[string]*jetstream.Journal{"owner": owner, "follower": follower, "later": later} {
		if n := j.Foreign(); n != messages {
			t.Errorf("%s: got %d foreign messages, want %d", name, n, messages)
		}
	}
	if !log.contains("kvcast has not written it") {
		t.Error("nothing is logged")
	}
}

// TestEntryOfAnotherFencesTheOwnerOfItsWorker publishes an entry of a worker as only its owner may. The owner must claim the worker again, and its
// other workers go on.
func TestEntryOfAnotherFencesTheOwnerOfItsWorker(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	a, _ := load(t, serverConfig(s.ClientURL()))
	b, _ := load(t, serverConfig(s.ClientURL()))
	source := mustClaim(t, a, "w")
	appendN(t, a, "v", 1)
	publishAsOwner(t, s, nats.Header{"Kvcast": {"0 0 m"}})
	awaitNewest(a, 4)
	appendN(t, a, "v", 1)
	_, err := appendOne(t, a, source, "x")
	wantFenced(t, err, `does not own worker "w"`)
	if _, err := appendOne(t, a, mustClaim(t, a, "w"), "y"); err != nil {
		t.Fatal(err)
	}
	wantSame(t, b, a)
	if a.Err() != nil || b.Err() != nil || a.Foreign() != 1 {
		t.Errorf("got errors %v and %v, and %d foreign messages, want 1", a.Err(), b.Err(), a.Foreign())
	}
}

// publishAsOwner publishes a message to the subject of worker w after its record.
func publishAsOwner(t *testing.T, s *server.Server, header nats.Header) {
	t.Helper()
	administer(t, s, func(js natsjs.JetStream) {
		m := &nats.Msg{Subject: "kvcast.kvcast.w", Header: header, Data: []byte("body")}
		if _, err := js.PublishMsg(t.Context(), m, natsjs.WithExpectLastSequencePerSubject(1)); err != nil {
			t.Fatal(err)
		}
	})
}

// TestUndecodableEntryEndsTheJournal publishes what has the headers of an entry, and cannot be decoded: it may be an entry whose events would be lost.
func TestUndecodableEntryEndsTheJournal(t *testing.T) {
	t.Parallel()
	for name, header := range map[string]nats.Header{
		"tiers": {"Kvcast": {"x 0 m"}}, "state": {"Kvcast": {"0 6 m"}}, "owner": {"Kvcast": {"0 0 m"}, "Kvcast-Owner": {"x"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t, t.TempDir(), 0)
			j, _ := load(t, serverConfig(s.ClientURL()))
			mustClaim(t, j, "w")
			publishAsOwner(t, s, header)
			harness.WaitFor(t, func() bool { return errors.Is(j.Err(), jetstream.ErrUnreadable) })
		})
	}
}

// TestForeignMessagesAmongAppendsLoseNone publishes messages for a worker while its owner has atomic batches on their way.
func TestForeignMessagesAmongAppendsLoseNone(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	j, _ := load(t, serverConfig(s.ClientURL()))
	appends, stop := startLoad(t, j)
	administer(t, s, func(js natsjs.JetStream) {
		for n := range 200 {
			if _, err := js.Publish(t.Context(), "kvcast.kvcast.w0", []byte("x")); err != nil {
				t.Fatal(err)
			}
			awaitNewest(j, uint64(10*n))
		}
	})
	stop()
	if err := j.Err(); err != nil || j.Foreign() != 200 {
		t.Fatalf("got %v and %d foreign messages, want 200", err, j.Foreign())
	}
	_, got := load(t, serverConfig(s.ClientURL()))
	wantOnce(t, slices.DeleteFunc(got, func(e jetstream.Entry) bool { return e.Invalid != nil }), appends.Load())
}
