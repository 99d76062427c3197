package client_test

import (
	"context"
	"errors"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/client"
)

// servers returns a client for scripted servers, in their order.
func servers(t *testing.T, scripted map[string]*scripted, target string) *client.Client {
	t.Helper()
	c, err := client.New(target, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			s := scripted[addr]
			if s == nil {
				return nil, errors.New("connection refused")
			}
			return s.listener.DialContext(ctx)
		}))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestNextServerIsResumedAtPosition ends the streams of three servers in turn.
func TestNextServerIsResumedAtPosition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := play(t, script{earliest(two()), status.Error(codes.Unavailable, "gone")}, script{messages: snapshot(9)})
		b := play(t, script{err: refusal(codes.Unavailable, "SHUTTING_DOWN", time.Minute)})
		a.client = servers(t, map[string]*scripted{"a": a, "b": b}, "passthrough:///a,passthrough:///gone,passthrough:///b")
		o := a.collect(t.Context(), client.Config{Start: client.FromEarliest()}, interrupted(3))
		if o.err != nil || len(a.requests()) != 1 || len(b.requests()) != 1 {
			t.Fatalf("error %v; %d and %d requests, want 1 and 1", o.err, len(a.requests()), len(b.requests()))
		}
		if got := b.requests()[0].GetAfter().GetSeq(); got != 2 {
			t.Errorf("the next server was asked for entries after %d, want 2", got)
		}
		for i, short := range []bool{true, true, false} {
			if got := o.interruptions[i].Wait; short != (got <= 100*time.Millisecond) {
				t.Errorf("wait %d: %v", i, got)
			}
		}
	})
}

func TestInvalidTargetInList(t *testing.T) {
	t.Parallel()
	if _, err := client.New("127.0.0.1:1,", grpc.WithTransportCredentials(insecure.NewCredentials())); err == nil {
		t.Error("no error")
	}
}
