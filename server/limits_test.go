package server_test

import (
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
	"github.com/kvcast/kvcast/test/harness"
)

// TestPingIntervalIsEnforced pings every 10 s, as clients in Python and Rust do. Servers allow that by default.
func TestPingIntervalIsEnforced(t *testing.T) {
	for name, tt := range map[string]struct {
		interval time.Duration
		ends     bool
	}{
		"default":  {0, false},
		"one hour": {time.Hour, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := start(t, harness.InstanceConfig{
					Server:  server.Config{Limits: server.Limits{PingInterval: tt.interval, ProgressInterval: time.Hour}},
					Journal: journal.Config{MaxAge: 24 * time.Hour}, InMemory: true,
				}, grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, PermitWithoutStream: true}))
				s := h.subscribe(checker.New(checker.Options{}), latest())
				ended := make(chan error, 1)
				go func() { ended <- s.end() }()
				select {
				case err := <-ended:
					if status.Code(err) != codes.Unavailable || !tt.ends {
						t.Errorf("the stream ended: %v", err)
					}
				case <-time.After(10 * time.Minute):
					if tt.ends {
						t.Error("the stream has not ended")
					}
					s.cancel()
					<-ended
				}
			})
		})
	}
}

// TestResponseBytesIsTheResponseSize reads many entries from the start. All messages but the last have newest_seq.
func TestResponseBytesIsTheResponseSize(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ bytes, most int }{
		"default":              {0, server.DefaultResponseBytes},
		"small":                {8 << 10, 8 << 10},
		"smaller than allowed": {1, server.MinResponseBytes},
		"larger than allowed":  {1 << 30, server.MaxResponseBytes},
	} {
		t.Run(name, func(t *testing.T) {
			h := overTCP(t, server.Config{Limits: server.Limits{ResponseBytes: tt.bytes}}, journal.Config{})
			h.addWorker()
			entries := tt.most / 30 // each entry has more than 40 bytes
			h.fill(entries)
			s := h.subscribe(checker.New(checker.Options{}), earliest())
			largest := 0
			for s.checker.Position().GetSeq() < uint64(entries)+1 {
				m, err := s.next()
				if err != nil {
					t.Fatal(err)
				}
				largest = max(largest, proto.Size(&kvcastv1.SubscribeResponse{Entries: m.GetEntries()}))
				newest := uint64(entries) + 1
				if m.GetPosition().GetSeq() == newest || m.GetAccepted() != nil {
					newest = 0
				}
				if m.GetNewestSeq() != newest {
					t.Fatalf("at %d: newest_seq is %d, want %d", m.GetPosition().GetSeq(), m.GetNewestSeq(), newest)
				}
			}
			if largest > tt.most || largest < tt.most-200 {
				t.Errorf("the largest response has %d bytes, want almost %d", largest, tt.most)
			}
		})
	}
}
