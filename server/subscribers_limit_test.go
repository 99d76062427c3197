package server

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// TestSubscribersResponseFitsClientLimit lists as many subscribers as are allowed by default, with records of maximum
// size, and then twice as many.
func TestSubscribersResponseFitsClientLimit(t *testing.T) {
	t.Parallel()
	s := New(Config{}, journal.NewMemory(journal.Config{}), nil)
	t.Cleanup(func() { s.Shutdown(context.Background()) })
	var f kvcastv1.Filter
	for n := range maxListedNames {
		f.Workers = append(f.Workers, fmt.Sprintf("%0*d", maxListedBytes, n))
	}
	f.Models = f.GetWorkers()
	add := func(n int) {
		for range n {
			s.subscribers.add(t.Context(), &kvcastv1.SubscribeRequest{Filter: &f, ClientId: strings.Repeat("a", maxClientID)}, 0, false).status.UserAgent = strings.Repeat("a", maxListedBytes)
		}
	}
	add(DefaultMaxSubscribers)
	all, err := routerEvents{Server: s}.ListSubscribers(t.Context(), nil)
	if err != nil || len(all.GetSubscribers()) != DefaultMaxSubscribers {
		t.Fatalf("default maximum: got %d, %v", len(all.GetSubscribers()), err)
	}
	add(DefaultMaxSubscribers)
	if _, err = (routerEvents{Server: s}).ListSubscribers(t.Context(), nil); status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "GetStatus") {
		t.Errorf("twice as many: got %v", err)
	}
}
