package jetstream_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal/jetstream"
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

// TestInvalidEntryFencesTheOwnerOfItsWorker publishes what claims to be an entry of a worker as only its owner may. The owner must claim the
// worker again, and its other workers go on.
func TestInvalidEntryFencesTheOwnerOfItsWorker(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		header nats.Header
		body   string
	}{
		"tiers":         {nats.Header{"Kvcast": {"x 0 m"}}, "valid"},
		"state":         {nats.Header{"Kvcast": {"0 6 m"}}, "valid"},
		"owner":         {nats.Header{"Kvcast": {"0 0 m"}, "Kvcast-Owner": {"x"}}, "valid"},
		"body":          {nats.Header{"Kvcast": {"0 0 m"}}, "invalid"},
		"not the owner": {nats.Header{"Kvcast": {"0 0 m"}}, "valid"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t, t.TempDir(), 0)
			cfg := serverConfig(s.ClientURL())
			cfg.Check = func(_ string, body []byte) error {
				if string(body) == "invalid" {
					return errors.New("it is invalid")
				}
				return nil
			}
			a, b := open(t, cfg), open(t, cfg)
			for _, j := range []*jetstream.Journal{a, b} {
				if err := j.Load(t.Context(), 0, func(jetstream.Entry) error { return nil }); err != nil {
					t.Fatal(err)
				}
			}
			source := mustClaim(t, a, "w")
			appendN(t, a, "v", 1)
			administer(t, s, func(js natsjs.JetStream) {
				m := &nats.Msg{Subject: "kvcast.kvcast.w", Header: tt.header, Data: []byte(tt.body)}
				if _, err := js.PublishMsg(t.Context(), m, natsjs.WithExpectLastSequencePerSubject(1)); err != nil {
					t.Fatal(err)
				}
			})
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
