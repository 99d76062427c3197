package server_test

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
)

// listed polls ListSubscribers until done returns true for the result.
func (h *fixture) listed(done func([]*kvcastv1.SubscriberStatus) bool) []*kvcastv1.SubscriberStatus {
	h.t.Helper()
	for {
		all, err := h.client.ListSubscribers(h.t.Context(), &kvcastv1.ListSubscribersRequest{})
		if err != nil {
			h.t.Fatal(err)
		}
		if done(all.GetSubscribers()) {
			return all.GetSubscribers()
		}
	}
}

// entries is the number of entries that exceed the buffers of a connection withSmallWindow.
const entries = 10_000

func TestSubscribersAreListed(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{MaxBytes: 1 << 30})
	h.addWorker()
	before := time.Now().UnixNano()
	named := earliest()
	named.ClientId = "router 7"
	reads := h.subscribe(checker.New(checker.Options{}), named)
	reads.until(t, 1)
	req := earliest()
	req.Filter = &kvcastv1.Filter{Workers: []string{strings.Repeat("é", 100), "w"}, Models: strings.Split("m,b,c,d,e,f,g,h,i", ",")}
	stalls := h.withSmallWindow().subscribe(checker.New(checker.Options{}), req)
	stalls.until(t, 1)
	h.fill(entries - 1)
	reads.until(t, entries)

	all := h.listed(func(all []*kvcastv1.SubscriberStatus) bool { return len(all) == 2 && all[0].GetSeq() == entries })
	if all[0].GetBehind() != 0 || all[0].GetFilter() != nil || all[0].GetInSnapshot() || all[0].GetClientId() != "router 7" {
		t.Errorf("the subscriber that has read all: got %v, want behind 0, no filter and its client_id", all[0])
	}
	if at := all[1].GetSeq(); at == 0 || at >= entries || all[1].GetBehind() != entries-at {
		t.Errorf("the subscriber that reads nothing: got %v, want behind the rest of the entries", all[1])
	}
	want := &kvcastv1.Filter{Workers: []string{strings.Repeat("é", 64), "w"}, Models: strings.Split("m,b,c,d,e,f,g,h", ",")}
	if got := all[1].GetFilter(); !proto.Equal(got, want) {
		t.Errorf("a long filter: got %v, want %v", got, want)
	}
	for i, one := range all {
		if !strings.HasPrefix(one.GetPeer(), "127.0.0.1:") || !strings.HasPrefix(one.GetUserAgent(), "grpc-go/") ||
			one.GetStartTimeUnixNano() < before || one.GetStartTimeUnixNano() > time.Now().UnixNano() {
			t.Errorf("subscriber %d: got %v, want its address, user agent and start time", i, one)
		}
	}
	reads.cancel()
	stalls.cancel()
	h.listed(func(all []*kvcastv1.SubscriberStatus) bool { return len(all) == 0 })
}

func TestListedSubscriberIsInSnapshot(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{MaxBytes: 1 << 30})
	h.addWorker()
	h.fill(entries - 1)
	s := h.withSmallWindow().subscribe(checker.New(checker.Options{}), fromSnapshot(nil))
	h.listed(func(all []*kvcastv1.SubscriberStatus) bool { return len(all) == 1 && all[0].GetInSnapshot() })
	s.until(t, entries)
	h.listed(func(all []*kvcastv1.SubscriberStatus) bool { return !all[0].GetInSnapshot() && all[0].GetBehind() == 0 })
}
