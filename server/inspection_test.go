package server_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/incident"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/server/access"
	"github.com/kvcast/kvcast/test/checker"
)

func (h *fixture) inspection() kvcastv1.InspectionServiceClient {
	return kvcastv1.NewInspectionServiceClient(h.conn)
}

func (h *fixture) entries(req *kvcastv1.ListEntriesRequest) *kvcastv1.ListEntriesResponse {
	h.t.Helper()
	got, err := h.inspection().ListEntries(h.t.Context(), req)
	if err != nil {
		h.t.Fatal(err)
	}
	return got
}

func seqsOf(r *kvcastv1.ListEntriesResponse) (all []uint64) {
	for _, e := range r.GetEntries() {
		all = append(all, e.GetSeq())
	}
	return all
}

func TestLastEntriesAreListed(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	if got := h.entries(&kvcastv1.ListEntriesRequest{}); len(got.GetEntries()) != 0 || got.GetNewestSeq() != 0 || got.GetSearchedAfter() != 0 {
		t.Errorf("an empty journal: got %v", got)
	}
	h.addWorker()                                                         // 1
	other := h.Pipeline.AddWorker(feed.Worker{Name: "other", Model: "m"}) // 2
	for n := range uint64(50) {                                           // 3 to 102, in turns
		h.append(n)
		h.batch(other, wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: []uint64{n}, BlockSize: 16})
	}
	for _, test := range []struct {
		req  *kvcastv1.ListEntriesRequest
		want []uint64
	}{
		{&kvcastv1.ListEntriesRequest{Limit: 4}, []uint64{102, 101, 100, 99}},
		{&kvcastv1.ListEntriesRequest{Worker: "w", Limit: 3}, []uint64{101, 99, 97}},
		{&kvcastv1.ListEntriesRequest{Worker: "other", Limit: 2}, []uint64{102, 100}},
		{&kvcastv1.ListEntriesRequest{Worker: "nobody"}, nil},
	} {
		got := h.entries(test.req)
		if diff := cmp.Diff(test.want, seqsOf(got)); diff != "" || got.GetNewestSeq() != 102 || got.GetSearchedAfter() != 0 {
			t.Errorf("%v: newest %d, searched after %d (-want +got):\n%s", test.req, got.GetNewestSeq(), got.GetSearchedAfter(), diff)
		}
		for _, e := range got.GetEntries() {
			if test.req.GetWorker() != "" && e.GetWorker() != test.req.GetWorker() || len(e.GetEvents()) != 1 {
				t.Errorf("%v: got entry %v", test.req, e)
			}
		}
	}
	if got := len(h.entries(&kvcastv1.ListEntriesRequest{}).GetEntries()); got != 20 {
		t.Errorf("without a limit: got %d entries, want 20", got)
	}
	if got := len(h.entries(&kvcastv1.ListEntriesRequest{Worker: "w", Limit: 100}).GetEntries()); got != 51 {
		t.Errorf("of w: got %d entries, want 51", got)
	}
	_, err := h.inspection().ListEntries(t.Context(), &kvcastv1.ListEntriesRequest{Limit: 101})
	wantStatus(t, err, codes.InvalidArgument, "INVALID_ARGUMENT")
}

// TestListedEntriesAreBounded also covers entries that are not retained any more.
func TestListedEntriesAreBounded(t *testing.T) {
	testclass.WithoutRace(t)
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{MaxBytes: 4 << 20})
	quiet := h.Pipeline.AddWorker(feed.Worker{Name: "quiet"})
	h.addWorker()
	h.load(200) // 64 KiB each
	got := h.entries(&kvcastv1.ListEntriesRequest{Limit: 100})
	if n := len(got.GetEntries()); n < 10 || n > 16 {
		t.Errorf("got %d entries of 64 KiB, want 1 MiB of them", n)
	}
	oldest := h.Journal.Bounds().Oldest
	if got := h.entries(&kvcastv1.ListEntriesRequest{Worker: "quiet"}); len(got.GetEntries()) != 0 || got.GetSearchedAfter() != oldest-1 || oldest < 3 {
		t.Errorf("a worker whose entries are evicted: got %v, the oldest entry is %d", got, oldest)
	}
	h.batch(quiet, wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: []uint64{1}, BlockSize: 16})
	h.fill(70_000)
	last := h.Journal.Bounds().Newest
	if got := h.entries(&kvcastv1.ListEntriesRequest{Worker: "quiet"}); len(got.GetEntries()) != 0 || got.GetSearchedAfter() < last-65_536 {
		t.Errorf("an entry before 70,000 others: got %v, want none of the last 65,536 of %d", got, last)
	}
}

func TestListedEntriesHaveNoTokenIDs(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	body, err := proto.Marshal(&kvcastv1.Entry{Worker: "w", Events: []*kvcastv1.RouterEvent{{
		EventId: 1, DpRank: proto.Uint32(0), Tier: kvcastv1.Tier_TIER_DEVICE,
		Event: &kvcastv1.RouterEvent_Stored{Stored: &kvcastv1.Stored{BlockHashes: []uint64{5}, TokensHashes: []uint64{6}, BlockSize: 4, TokenIds: []uint32{1, 2, 3, 4}}},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.Journal.Append(t.Context(), journal.Record{Source: &journal.Source{Worker: "w"}, Tiers: kvblock.TierBit(1), Body: body}); err != nil {
		t.Fatal(err)
	}
	if err := h.Follower.Wait(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	stored := h.entries(&kvcastv1.ListEntriesRequest{}).GetEntries()[0].GetEvents()[0].GetStored()
	if len(stored.GetTokenIds()) != 0 || len(stored.GetTokensHashes()) != 1 {
		t.Errorf("got %v, want hashes without token ids", stored)
	}
}

// incidents lists incidents until done returns true.
func (h *fixture) incidents(kind kvcastv1.IncidentKind) *kvcastv1.Incident {
	h.t.Helper()
	for {
		got, err := h.inspection().ListIncidents(h.t.Context(), &kvcastv1.ListIncidentsRequest{Kinds: []kvcastv1.IncidentKind{kind}})
		if err != nil {
			h.t.Fatal(err)
		}
		if all := got.GetIncidents(); len(all) > 0 {
			return all[0]
		}
	}
}

func TestEndsOfSubscriptionsAreRemembered(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{Limits: server.Limits{StallTimeout: 100 * time.Millisecond}}, journal.Config{MaxBytes: 1 << 30})
	h.addWorker()
	leaves := h.subscribe(checker.New(checker.Options{}), earliest())
	leaves.until(t, 1)
	leaves.cancel()
	left := h.incidents(kvcastv1.IncidentKind_INCIDENT_KIND_SUBSCRIBER_LEFT)
	if left.GetSeq() != 1 || left.GetBehind() != 0 || left.GetReason() != "" || left.GetPeer() == "" || left.GetDurationNano() == 0 {
		t.Errorf("one that leaves: got %v", left)
	}
	stalls := h.withSmallWindow().subscribe(checker.New(checker.Options{}), latest())
	stalls.until(t, 1)
	h.flood()
	ended := h.incidents(kvcastv1.IncidentKind_INCIDENT_KIND_SUBSCRIBER_ENDED)
	newest := h.Journal.Bounds().Newest
	if ended.GetReason() != "SLOW_SUBSCRIBER" || ended.GetBehind() == 0 || ended.GetSeq()+ended.GetBehind() > newest {
		t.Errorf("one that does not read: got %v, the newest entry is %d", ended, newest)
	}
}

func TestIncidentsAreValidated(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	for _, req := range []*kvcastv1.ListIncidentsRequest{
		{Limit: incident.MaxLimit + 1},
		{Kinds: []kvcastv1.IncidentKind{0}},
		{Kinds: []kvcastv1.IncidentKind{1, 99}},
		{Kinds: make([]kvcastv1.IncidentKind, 1000)},
	} {
		_, err := h.inspection().ListIncidents(t.Context(), req)
		wantStatus(t, err, codes.InvalidArgument, "INVALID_ARGUMENT")
	}
}

func TestRoutersMayInspect(t *testing.T) {
	t.Parallel()
	log := new(incident.Log)
	log.Add(&kvcastv1.Incident{Kind: kvcastv1.IncidentKind_INCIDENT_KIND_GAP, Worker: "w"})
	h := overTCP(t, server.Config{Access: access.List{Tokens: tokens(t)}, Incidents: log}, journal.Config{})
	for _, token := range []string{routersToken, operatorsToken} {
		got, err := kvcastv1.NewInspectionServiceClient(h.as("Bearer "+token)).ListIncidents(t.Context(), &kvcastv1.ListIncidentsRequest{})
		if err != nil || len(got.GetIncidents()) != 1 || got.GetNewestId() != 1 {
			t.Errorf("%s: got %v, %v", token, got, err)
		}
	}
	_, err := h.inspection().ListIncidents(t.Context(), &kvcastv1.ListIncidentsRequest{})
	wantStatus(t, err, codes.Unauthenticated, "UNAUTHENTICATED")
}

func TestStatusHasTheRetention(t *testing.T) {
	t.Parallel()
	log := new(incident.Log)
	for range 3 {
		log.Add(&kvcastv1.Incident{})
	}
	h := overTCP(t, server.Config{Retention: journal.Config{MaxBytes: 5, MaxAge: 7}, Incidents: log}, journal.Config{})
	got, err := h.client.GetStatus(t.Context(), &kvcastv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprint(got.GetJournalMaxBytes(), got.GetJournalMaxAgeNano(), got.GetNewestIncidentId(), got.GetSnapshots(), got.GetSnapshotsWaiting(), got.GetReplays())
	if text != "5 7 3 0 0 0" {
		t.Errorf("got %s", text)
	}
}

func TestSharedPrefixesAreListed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := inMemory(t, server.Config{}, journal.Config{})
		store := func(worker string, hashes ...uint64) {
			h.batch(h.Pipeline.AddWorker(feed.Worker{Name: worker, Model: "m"}), wire.Event{
				Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: hashes, TokensHashes: hashes, BlockSize: 16,
			})
		}
		list := func() *kvcastv1.ListSharedPrefixesResponse {
			got, err := h.inspection().ListSharedPrefixes(t.Context(), &kvcastv1.ListSharedPrefixesRequest{Model: "m"})
			if err != nil {
				t.Fatal(err)
			}
			return got
		}
		if got := list(); got.GetBlocks() != 0 || len(got.GetBlocksByRanks()) != 0 {
			t.Errorf("without workers: got %v", got)
		}
		store("a", 1, 2, 3)
		store("b", 1, 2, 4, 5)
		if got := list(); got.GetBlocks() != 0 {
			t.Errorf("within 5 s: got %v, want the same answer", got)
		}
		time.Sleep(6 * time.Second)
		want := &kvcastv1.ListSharedPrefixesResponse{
			Blocks: 5, Copies: 7, BlocksByRanks: []uint64{3, 2}, TimeUnixNano: time.Now().UnixNano(),
			Prefixes: []*kvcastv1.SharedPrefix{{Model: "m", Blocks: 2, Copies: 4, MaxRanks: 2, TokensHashes: []uint64{1, 2}}},
		}
		got := list()
		if diff := cmp.Diff(want, got, protocmp.Transform(), protocmp.IgnoreFields(&kvcastv1.SharedPrefix{}, "id")); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		chain, err := h.inspection().GetChain(t.Context(), &kvcastv1.GetChainRequest{Worker: "b", BlockHash: 4})
		if wantChain := (&kvcastv1.GetChainResponse{TokensHashes: []uint64{1, 2, 4}, Model: "m"}); err != nil || !proto.Equal(chain, wantChain) {
			t.Errorf("the prompt to block 4: got %v, %v; want %v", chain, err, wantChain)
		}
		for _, req := range []*kvcastv1.GetChainRequest{{Worker: "b", BlockHash: 3}, {Worker: "c", BlockHash: 1}, {Worker: "b", DpRank: 1, BlockHash: 1}} {
			if chain, err := h.inspection().GetChain(t.Context(), req); err != nil || !proto.Equal(chain, &kvcastv1.GetChainResponse{}) {
				t.Errorf("%v: got %v, %v; want none", req, chain, err)
			}
		}
		_, err = h.inspection().ListSharedPrefixes(t.Context(), &kvcastv1.ListSharedPrefixesRequest{Limit: 501})
		wantStatus(t, err, codes.InvalidArgument, "INVALID_ARGUMENT")
	})
}

// TestScanOfSharedPrefixesServesAllLimits stores blocks after a scan, and lists with other limits.
func TestScanOfSharedPrefixesServesAllLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := inMemory(t, server.Config{}, journal.Config{})
		for _, worker := range []string{"a", "b"} {
			lane := h.Pipeline.AddWorker(feed.Worker{Name: worker, Model: "m"})
			for n := range uint64(10) { // prompts of different lengths
				hashes := make([]uint64, n+1)
				for i := range hashes {
					hashes[i] = 100*n + uint64(i) + 1
				}
				h.batch(lane, wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: hashes, TokensHashes: hashes, BlockSize: 16})
			}
		}
		blocks := uint64(0)
		for i, limit := range []uint32{500, 4, 0, 1, 500} {
			got, err := h.inspection().ListSharedPrefixes(t.Context(), &kvcastv1.ListSharedPrefixesRequest{Model: "m", Limit: limit})
			if err != nil {
				t.Fatal(err)
			}
			if blocks == 0 {
				blocks = got.GetBlocks()
			}
			want := 10
			if limit == 4 || limit == 1 {
				want = int(limit+1) / 2 // that are shared most
			}
			if got.GetBlocks() != blocks || len(got.GetPrefixes()) != want {
				t.Errorf("limit %d: got %d blocks and %d prefixes, want %d and %d", limit, got.GetBlocks(), len(got.GetPrefixes()), blocks, want)
			}
			for _, p := range got.GetPrefixes() {
				if least := uint64(11 - want); p.GetBlocks() < least {
					t.Errorf("limit %d: got a prefix of %d blocks, want at least %d", limit, p.GetBlocks(), least)
				}
			}
			lane := h.Pipeline.AddWorker(feed.Worker{Name: fmt.Sprint("later", i), Model: "m"})
			later := []uint64{10_000 + uint64(i)}
			h.batch(lane, wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: later, TokensHashes: later, BlockSize: 16})
		}
	})
}

// TestScansOfSharedPrefixesHaveAnInterval lists the prefixes of one model after another. Every other call gives up while it waits.
func TestScansOfSharedPrefixesHaveAnInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const rounds = 10
		h := inMemory(t, server.Config{}, journal.Config{})
		began := time.Now()
		for n := range rounds {
			ended, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			_, err := h.inspection().ListSharedPrefixes(ended, &kvcastv1.ListSharedPrefixesRequest{Model: fmt.Sprint("other", n)})
			cancel()
			if n > 0 && status.Code(err) != codes.DeadlineExceeded {
				t.Errorf("a call that must wait for longer than its deadline: got %v", err)
			}
			if _, err := h.inspection().ListSharedPrefixes(t.Context(), &kvcastv1.ListSharedPrefixesRequest{Model: fmt.Sprint(n % 2)}); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(began); took < (rounds-1)*time.Second || took > 2*rounds*time.Second {
			t.Errorf("%d scans took %v, want one a second", rounds, took)
		}
	})
}
