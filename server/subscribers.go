package server

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// subscriber is what others may know of a Subscribe stream while it runs.
type subscriber struct {
	peer, userAgent string
	filter          *kvcastv1.Filter
	began           time.Time
	// seq is up to where it has been served. Its stream alone writes it, and
	// inSnapshot.
	seq        atomic.Uint64
	inSnapshot atomic.Bool
}

// subscribers are the Subscribe streams that are open, as many as may be.
type subscribers struct {
	streams

	listMu sync.Mutex // guards listed
	listed map[*subscriber]struct{}
}

// add lists a stream that has entered.
func (s *subscribers) add(ctx context.Context, f *kvcastv1.Filter) *subscriber {
	one := &subscriber{filter: shortened(f), began: time.Now()}
	if p, ok := peer.FromContext(ctx); ok {
		one.peer = p.Addr.String()
	}
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		if agent := md.Get("user-agent"); len(agent) > 0 {
			one.userAgent = strings.ToValidUTF8(agent[0][:min(len(agent[0]), maxListedBytes)], "")
		}
	}
	s.listMu.Lock()
	defer s.listMu.Unlock()
	if s.listed == nil {
		s.listed = make(map[*subscriber]struct{})
	}
	s.listed[one] = struct{}{}
	return one
}

// remove takes it off the list again.
func (s *subscribers) remove(one *subscriber) {
	s.listMu.Lock()
	defer s.listMu.Unlock()
	delete(s.listed, one)
}

// list returns those that are open, the oldest first.
func (s *subscribers) list() []*subscriber {
	s.listMu.Lock()
	defer s.listMu.Unlock()
	all := make([]*subscriber, 0, len(s.listed))
	for one := range s.listed {
		all = append(all, one)
	}
	slices.SortFunc(all, func(a, b *subscriber) int { return a.began.Compare(b.began) })
	return all
}

// What is told of a subscriber is bounded, so that an answer that lists all of them
// fits into what clients take.
const (
	maxListedNames = 8
	maxListedBytes = 128
)

// shortened returns a filter with its first names.
func shortened(f *kvcastv1.Filter) *kvcastv1.Filter {
	if f == nil {
		return nil
	}
	return &kvcastv1.Filter{Workers: firstNames(f.GetWorkers()), Models: firstNames(f.GetModels()), Tiers: f.GetTiers()[:min(len(f.GetTiers()), maxListedNames)]}
}

func firstNames(names []string) (first []string) {
	for _, name := range names[:min(len(names), maxListedNames)] {
		first = append(first, strings.ToValidUTF8(name[:min(len(name), maxListedBytes)], ""))
	}
	return first
}

// ListSubscribers implements kvcastv1.RouterEventServiceServer.
func (s routerEvents) ListSubscribers(context.Context, *kvcastv1.ListSubscribersRequest) (*kvcastv1.ListSubscribersResponse, error) {
	out := new(kvcastv1.ListSubscribersResponse)
	for _, one := range s.subscribers.list() {
		seq := one.seq.Load()
		out.Subscribers = append(out.Subscribers, &kvcastv1.SubscriberStatus{
			Peer:              one.peer,
			UserAgent:         one.userAgent,
			Filter:            one.filter,
			StartTimeUnixNano: one.began.UnixNano(),
			Seq:               seq,
			Behind:            s.journal.Bounds().Newest - seq, // asked for later, so it is not less
			InSnapshot:        one.inSnapshot.Load(),
		})
	}
	if !fits(out) {
		return nil, errResponseTooLarge(fmt.Sprintf("the %d subscribers with their filters", len(out.GetSubscribers())), "ask GetStatus for their number", s.journal.Bounds())
	}
	return out, nil
}
