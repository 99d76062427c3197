package client_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// earliest returns the messages of a stream from the first entry.
func earliest(more ...*kvcastv1.SubscribeResponse) []*kvcastv1.SubscribeResponse {
	return append([]*kvcastv1.SubscribeResponse{accepted(kvcastv1.Accepted_MODE_EARLIEST, 0)}, more...)
}

// two returns a message with entries 1 and 2.
func two() *kvcastv1.SubscribeResponse {
	return message(0, entryOf(1, "w", workerAdded(1)), entryOf(2, "w", store(2, 7)))
}

func TestEndedStreamIsResumed(t *testing.T) {
	for _, end := range []error{
		io.EOF, status.Error(codes.Unavailable, "gone"), status.Error(codes.Internal, "RST_STREAM"), status.Error(codes.Unknown, "?"),
		status.Error(codes.Canceled, "by a proxy"), refusal(codes.ResourceExhausted, "SLOW_SUBSCRIBER", time.Second),
	} {
		t.Run(end.Error(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := play(t, script{earliest(two()), end}, script{messages: []*kvcastv1.SubscribeResponse{
					resumed(2), message(2, entryOf(3, "w", store(3, 8))),
				}})
				o := s.collect(t.Context(), client.Config{Start: client.FromEarliest()}, func(o *outcome) bool {
					return o.updates[len(o.updates)-1].Position.Seq == 3
				})
				var seqs []uint64
				for _, u := range o.updates {
					for _, e := range u.Message.GetEntries() {
						seqs = append(seqs, e.GetSeq())
					}
				}
				if o.err != nil || !slices.Equal(seqs, []uint64{1, 2, 3}) || len(o.interruptions) != 1 {
					t.Errorf("got entries %v, interruptions %v, error %v", seqs, o.interruptions, o.err)
				}
				if i := o.interruptions[0]; i.Snapshot || i.Failures != 1 || i.Wait < client.DefaultBackoffMin/2 {
					t.Errorf("got %+v", i)
				}
				if got := s.requests()[1].GetAfter(); got.GetSeq() != 2 || got.GetEpoch() != "e" {
					t.Errorf("resumed after %v, want e:2", got)
				}
			})
		})
	}
}

func TestCutSnapshotRestarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := play(t, script{snapshot(9)[:4], io.EOF}, script{messages: append(snapshot(9), progress(9))})
		o := s.collect(t.Context(), client.Config{Start: client.After(client.Position{Epoch: "e", Seq: 2})}, func(o *outcome) bool {
			return o.updates[len(o.updates)-1].Message.GetProgress() != nil
		})
		for i, u := range o.updates {
			complete := u.Message.GetSnapshotEnd() != nil || u.Message.GetProgress() != nil
			if u.Position.IsZero() == complete {
				t.Errorf("update %d has position %v", i, u.Position)
			}
		}
		if i := o.interruptions; o.err != nil || len(i) != 1 || !i[0].Snapshot {
			t.Errorf("got interruptions %v, error %v", i, o.err)
		}
		if got := s.requests(); got[0].GetAfter().GetSeq() != 2 || got[1].GetSnapshot() == nil {
			t.Errorf("requests: %v", got)
		}
	})
}

func TestPermanentErrorsEndSubscription(t *testing.T) {
	for _, tt := range []struct {
		code   codes.Code
		reason string
		cfg    client.Config
	}{
		{codes.InvalidArgument, "INVALID_ARGUMENT", client.Config{}},
		{codes.Unauthenticated, "UNAUTHENTICATED", client.Config{}},
		{codes.PermissionDenied, "PERMISSION_DENIED", client.Config{}},
		{codes.Unimplemented, "UNIMPLEMENTED", client.Config{}},
		{codes.OutOfRange, client.ReasonPositionAhead, client.Config{}},
		{codes.OutOfRange, client.ReasonPositionCompacted, client.Config{GapPolicy: client.GapFail}},
		{codes.FailedPrecondition, client.ReasonEpochMismatch, client.Config{GapPolicy: client.GapFail}},
	} {
		t.Run(tt.reason, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := play(t, script{err: refusal(tt.code, tt.reason, 0)})
				tt.cfg.Start = client.After(client.Position{Epoch: "e", Seq: 2})
				o := s.collect(t.Context(), tt.cfg, interrupted(1))
				var got *client.Error
				if !errors.As(o.err, &got) || got.Code != tt.code || got.Reason != tt.reason || got.Oldest != 5 || got.Newest != 9 || got.Epoch != "e" {
					t.Errorf("got %+v, want %v with reason %s", o.err, tt.code, tt.reason)
				}
				if status.Code(o.err) != tt.code {
					t.Errorf("status: got %v, want %v", status.Code(o.err), tt.code)
				}
				if n := len(s.requests()); n != 1 || len(o.updates) > 0 {
					t.Errorf("%d requests and updates %v, want 1 and none", n, o.updates)
				}
			})
		})
	}
}

func TestLostPositionIsReplacedBySnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// The server ignores the gap policy.
		s := play(t, script{err: refusal(codes.OutOfRange, client.ReasonPositionCompacted, 0)}, script{messages: snapshot(9)})
		o := s.collect(t.Context(), client.Config{Start: client.AfterSeq(2)}, began(1))
		if got := s.requests(); o.err != nil || got[0].GetAfter().GetSeq() != 2 || got[1].GetSnapshot() == nil {
			t.Errorf("error %v; requests %v", o.err, got)
		}
	})
}

func TestRetryInfoIsObeyed(t *testing.T) {
	const requested = 47 * time.Second // exceeds the backoff
	synctest.Test(t, func(t *testing.T) {
		s := play(t, script{err: refusal(codes.ResourceExhausted, "TOO_MANY_SUBSCRIBERS", requested)}, script{messages: snapshot(9)})
		o := s.collect(t.Context(), client.Config{}, began(1))
		times := s.times()
		if waited := times[1].Sub(times[0]); waited < requested || waited > requested*5/4 || o.interruptions[0].Wait != waited {
			t.Errorf("waited %v, Interruption.Wait %v, want %v to a quarter more", waited, o.interruptions[0].Wait, requested)
		}
	})
}

func TestBackoffGrowsAndResets(t *testing.T) {
	const least, most = time.Second, 10 * time.Second
	synctest.Test(t, func(t *testing.T) {
		gone := script{err: status.Error(codes.Unavailable, "gone")}
		s := play(t, gone, gone, gone, gone, gone, gone, script{earliest(two()), io.EOF}, gone)
		o := s.collect(t.Context(), client.Config{Start: client.FromEarliest(), BackoffMin: least, BackoffMax: most}, interrupted(8))
		want := []time.Duration{1, 2, 4, 8, 10, 10, 1, 2}
		for i, got := range o.interruptions {
			if w := want[i] * time.Second; got.Wait > w || got.Wait < w/2 {
				t.Errorf("wait %d: %v, want %v to %v", i, got.Wait, w/2, w)
			}
		}
		if got := o.interruptions[5].Failures; got != 6 {
			t.Errorf("%d failures, want 6", got)
		}
	})
}

func TestIdleStreamIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := play(t, script{messages: earliest(two())}, script{messages: []*kvcastv1.SubscribeResponse{resumed(2)}})
		began := time.Now()
		var at []time.Duration
		o := s.collect(t.Context(), client.Config{Start: client.FromEarliest()}, func(o *outcome) bool {
			if o.updates[len(o.updates)-1].Interruption != nil {
				at = append(at, time.Since(began))
			} else {
				// The time in which the caller processes an update does not count.
				<-time.After(time.Hour)
				began = time.Now()
			}
			return len(at) == 2
		})
		for _, got := range at {
			if got != client.DefaultIdleTimeout {
				t.Errorf("replaced after %v, want %v", got, client.DefaultIdleTimeout)
			}
		}
		for _, i := range o.interruptions {
			if !errors.Is(i.Err, client.ErrIdle) || i.Snapshot {
				t.Errorf("got %+v, want ErrIdle", i)
			}
		}
	})
}

// TestIdleTimeoutFollowsProgressInterval uses servers with different progress intervals.
func TestIdleTimeoutFollowsProgressInterval(t *testing.T) {
	for name, tt := range map[string]struct {
		says uint64
		set  time.Duration
		want time.Duration
	}{
		"no interval":              {0, 0, client.DefaultIdleTimeout},
		"ten seconds":              {uint64(10 * time.Second), 0, 30 * time.Second},
		"long interval":            {uint64(time.Hour), 0, 3 * time.Hour},
		"short interval":           {uint64(time.Millisecond), 0, client.LeastIdleTimeout},
		"timeout is set":           {uint64(10 * time.Second), 15 * time.Second, 15 * time.Second},
		"timeout is set too short": {uint64(10 * time.Second), time.Second, time.Second},
		"largest interval":         {math.MaxUint64, time.Second, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := resumed(2)
				a.Accepted.ProgressIntervalNano = tt.says
				var log bytes.Buffer
				s, began := play(t, script{messages: messages{a}}), time.Now()
				cfg := client.Config{Start: client.After(client.Position{Epoch: "e", Seq: 2}), IdleTimeout: tt.set}
				cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
				o := s.collect(t.Context(), cfg, interrupted(1))
				if got := time.Since(began); got != tt.want || !errors.Is(o.interruptions[0].Err, client.ErrIdle) {
					t.Errorf("%v after %v, want ErrIdle after %v", o.interruptions, got, tt.want)
				}
				if warned := strings.Contains(log.String(), "the idle timeout does not exceed"); warned != (tt.set == time.Second) {
					t.Errorf("logged:\n%s", log.String())
				}
			})
		})
	}
}

func TestProgressResetsIdleTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := play(t, script{messages: earliest(two())})
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		o := s.collect(ctx, client.Config{Start: client.FromEarliest(), IdleTimeout: -1}, interrupted(1))
		if o.err != nil || len(o.interruptions) > 0 || len(s.requests()) != 1 {
			t.Errorf("idle for an hour with Progress: error %v, interruptions %v", o.err, o.interruptions)
		}
	})
}

// TestHeartbeatsKeepWaitingSnapshotAlive announces or begins a snapshot, and then sends only heartbeats for longer than
// the idle timeout. The snapshot then continues, or the stream has no further message.
func TestHeartbeatsKeepWaitingSnapshotAlive(t *testing.T) {
	// The digests of a heartbeat must not be compared, since it has no position.
	digest := &kvcastv1.WorkerDigest{Worker: "w", Tier: device, Blocks: 5, Digest: 1}
	const pause = client.DefaultIdleTimeout - time.Second
	at := client.Position{Epoch: "e", Seq: 9}
	for name, tt := range map[string]struct {
		start     client.Start
		digests   bool
		before    int // number of messages before the heartbeats
		heartbeat *kvcastv1.SubscribeResponse
	}{
		"announced":                {client.FromSnapshot(), false, 1, heartbeat()},
		"announced, with digests":  {client.FromSnapshot(), true, 1, heartbeat(digest)},
		"announced after a resume": {client.After(at), true, 1, heartbeat()},
		"begun":                    {client.FromSnapshot(), true, 2, heartbeat()},
		"begun, with digests":      {client.FromSnapshot(), true, 4, heartbeat(digest)},
	} {
		t.Run(name, func(t *testing.T) {
			waits := slices.Concat(snapshot(9)[:tt.before], messages{tt.heartbeat, tt.heartbeat, tt.heartbeat})
			cfg := client.Config{Start: tt.start, Digests: tt.digests}
			synctest.Test(t, func(t *testing.T) {
				s, v := play(t, script{messages: slices.Concat(waits, snapshot(9)[tt.before:])}), client.NewView()
				s.pause = pause
				o := s.collect(t.Context(), cfg, func(o *outcome) bool {
					u := o.updates[len(o.updates)-1]
					v.Apply(u)
					if u.Message.GetSnapshotEnd() == nil && (!u.Position.IsZero() || v.Status().Ready) {
						t.Errorf("%v has position %v; the view is %+v", u.Message, u.Position, v.Status())
					}
					return u.Message.GetSnapshotEnd() != nil || u.Interruption != nil
				})
				if got := v.Status(); o.err != nil || len(o.interruptions) > 0 || got.Snapshots != 1 || got.Position != at || got.Compared != 0 {
					t.Errorf("error %v, interruptions %v; the view is %+v", o.err, o.interruptions, got)
				}
			})
			synctest.Test(t, func(t *testing.T) {
				s, began := play(t, script{messages: waits}), time.Now()
				s.pause = pause
				o := s.collect(t.Context(), cfg, interrupted(1))
				want := time.Duration(len(waits))*pause + client.DefaultIdleTimeout
				if got := time.Since(began); got != want || len(o.interruptions) != 1 || !errors.Is(o.interruptions[0].Err, client.ErrIdle) {
					t.Errorf("no further message: error %v, interruptions %v after %v, want ErrIdle after %v", o.err, o.interruptions, got, want)
				}
			})
		})
	}
}

// TestBackoffGrowsWithoutSnapshot has one stream with a complete snapshot, and then streams that end between the
// Accepted and the snapshot.
func TestBackoffGrowsWithoutSnapshot(t *testing.T) {
	digest := &kvcastv1.WorkerDigest{Worker: "w", Tier: device, Blocks: 5, Digest: 1}
	synctest.Test(t, func(t *testing.T) {
		v := client.NewView()
		s := play(t, script{earliest(two()), io.EOF}, script{messages{announced(), heartbeat(digest)}, io.EOF})
		o := s.collect(t.Context(), client.Config{Start: client.FromEarliest(), Digests: true}, func(o *outcome) bool {
			v.Apply(o.updates[len(o.updates)-1])
			return len(o.interruptions) == 4
		})
		if got := o.interruptions[3]; got.Failures != 4 || !errors.Is(got.Err, client.ErrEnded) || v.Status().Compared != 0 {
			t.Errorf("got %+v, the view is %+v, want 4 failures and nothing compared", got, v.Status())
		}
	})
}

func TestContextEndsRangeWithoutError(t *testing.T) {
	for name, streams := range map[string][]script{
		"while a stream is open": {{messages: earliest(two())}},
		"during the backoff":     {{err: refusal(codes.Unavailable, "STARTING", 3*time.Minute)}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := play(t, streams...)
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				began := time.Now()
				o := s.collect(ctx, client.Config{Start: client.FromEarliest()}, func(*outcome) bool { return false })
				if o.err != nil || time.Since(began) != time.Second {
					t.Errorf("ended after %v with %v", time.Since(began), o.err)
				}
			})
		})
	}
}

func TestConfigErrors(t *testing.T) {
	t.Parallel()
	for field, cfg := range map[string]client.Config{
		"IdleTimeout": {IdleTimeout: time.Millisecond},
		"BackoffMin":  {BackoffMin: -1},
		"BackoffMax":  {BackoffMin: 2, BackoffMax: 1},
		"GapPolicy":   {GapPolicy: 7},
	} {
		n := 0
		for u, err := range client.FromConn(nil).Subscribe(t.Context(), cfg) {
			var ce *client.ConfigError
			if n++; !errors.As(err, &ce) || ce.Field != field || u.Message != nil {
				t.Errorf("%s: got %v", field, err)
			}
		}
		if n != 1 {
			t.Errorf("%s: %d updates, want only the error", field, n)
		}
	}
	if _, err := client.New("localhost:1"); err == nil {
		t.Error("New without transport credentials: no error")
	}
}

// TestViolationClearsPosition violates the contract. The server then refuses digests.
func TestViolationClearsPosition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := play(t, script{messages: earliest(two(), message(7, entryOf(9, "w", store(5, 8))))}, script{err: refusal(codes.Unimplemented, "UNIMPLEMENTED", 0)}, script{messages: snapshot(9)})
		o := s.collect(t.Context(), client.Config{Start: client.FromEarliest(), Digests: true}, interrupted(2))
		for _, u := range o.updates {
			if u.Interruption != nil && (!u.Interruption.Snapshot || !u.Position.IsZero()) {
				t.Errorf("%+v with position %v, want Snapshot without a position", u.Interruption, u.Position)
			}
		}
		if len(o.interruptions) != 2 {
			t.Errorf("interruptions %v, error %v", o.interruptions, o.err)
		}
	})
}

func TestSubscriptionContinuesWithoutDigests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := play(t, script{err: refusal(codes.Unimplemented, "UNIMPLEMENTED", 0)}, script{messages: snapshot(9)})
		o := s.collect(t.Context(), client.Config{Digests: true}, began(1))
		got := s.requests()
		if o.err != nil || len(got) != 2 || !got[0].GetProgressDigests() || got[1].GetProgressDigests() {
			t.Errorf("error %v; requests %v", o.err, got)
		}
		if waited := s.times()[1].Sub(s.times()[0]); waited != 0 {
			t.Errorf("waited %v", waited)
		}
	})
}
