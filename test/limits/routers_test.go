package limits

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// The numbers of position and snapshot_end in SubscribeResponse and SnapshotResponse.
const (
	positionField    = 2
	snapshotEndField = 9
)

// answer is what the answers of a call have had.
type answer struct {
	seq  uint64 // of the newest position
	ends int    // of snapshots
}

// codec encodes requests, and looks at answers without decoding their blocks, which would take longer than to send them.
type codec struct{}

func (codec) Name() string { return "proto" }

func (codec) Marshal(m any) (mem.BufferSlice, error) {
	b, err := proto.Marshal(m.(proto.Message))
	return mem.BufferSlice{mem.SliceBuffer(b)}, err
}

func (codec) Unmarshal(data mem.BufferSlice, to any) error {
	a := to.(*answer)
	for b := data.Materialize(); len(b) > 0; {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		size := protowire.ConsumeFieldValue(number, kind, b)
		if size < 0 {
			return protowire.ParseError(size)
		}
		switch number { //nolint:exhaustive // others are not read
		case positionField:
			var position kvcastv1.Position
			field, _ := protowire.ConsumeBytes(b)
			if err := proto.Unmarshal(field, &position); err != nil {
				return err
			}
			a.seq = position.GetSeq()
		case snapshotEndField:
			a.ends++
		}
		b = b[size:]
	}
	return nil
}

// readAll begins all subscriptions and snapshots at the same time, each by a connection of its own. It returns when each snapshot is complete, and each subscription
// has read its snapshot and, after the last snapshot's end, wantEntries entries. Slow subscribers read nothing until the others are done. The server may end
// their streams before.
//
// The journal retains what the engines publish in some 25 s, and a busy machine may need longer to read the snapshots, or the entries. So the engines pause
// when they have published maxEntries, until all clients have read the snapshots or the entries.
func readAll(t *testing.T, addr string, engines *os.Process) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*harness.Timeout)
	defer cancel()
	pacer := &pacer{engines: engines, status: kvcastv1.NewRouterEventServiceClient(harness.Dial(t, addr))}
	var snapshotsLeft sync.WaitGroup
	var clients, slow errgroup.Group
	others := make(chan struct{})
	var target atomic.Uint64
	target.Store(math.MaxUint64) // until all snapshots have been read
	for i := range subscribers + snapshots {
		conn := harness.Dial(t, addr)
		if i < slowSubscribers {
			slow.Go(func() error {
				stream, err := begin(ctx, conn, kvcastv1.RouterEventService_Subscribe_FullMethodName, &kvcastv1.SubscribeRequest{})
				if err != nil {
					return fmt.Errorf("slow subscriber %d: %w", i, err)
				}
				<-others
				_ = receive(stream, new(answer), func(a *answer) bool { return a.seq >= target.Load() })
				return nil
			})
			continue
		}
		method, request := kvcastv1.RouterEventService_Subscribe_FullMethodName, proto.Message(&kvcastv1.SubscribeRequest{})
		if i >= subscribers {
			method, request = kvcastv1.RouterEventService_Snapshot_FullMethodName, &kvcastv1.SnapshotRequest{}
		}
		snapshotsLeft.Add(1)
		clients.Go(func() error {
			var read answer
			stream, err := begin(ctx, conn, method, request)
			if err == nil {
				err = receive(stream, &read, func(a *answer) bool { return a.ends > 0 })
			}
			snapshotsLeft.Done()
			if err == nil && i < subscribers {
				err = receive(stream, &read, func(a *answer) bool { return a.seq >= target.Load() })
			}
			if err != nil {
				return fmt.Errorf("client %d, %s after %d snapshots: %w", i, method, read.ends, err)
			}
			return nil
		})
	}
	pacer.pace(t, closed(snapshotsLeft.Wait))
	target.Store(pacer.newest(t) + wantEntries)
	var err error
	pacer.pace(t, closed(func() { err = clients.Wait() }))
	close(others)
	if err := errors.Join(err, slow.Wait()); err != nil {
		t.Error(err)
	}
}

// closed returns a channel that is closed when f has returned.
func closed(f func()) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	return done
}

// pacer pauses engines.
type pacer struct {
	engines *os.Process
	status  kvcastv1.RouterEventServiceClient
}

// newest returns the seq of the journal's newest entry.
func (p *pacer) newest(t *testing.T) uint64 {
	t.Helper()
	status, err := p.status.GetStatus(harness.Context(t), &kvcastv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return status.GetNewestSeq()
}

// pace returns when done is closed. The engines pause when they have published maxEntries before.
func (p *pacer) pace(t *testing.T, done <-chan struct{}) {
	t.Helper()
	begin := p.newest(t)
	poll := time.NewTicker(250 * time.Millisecond)
	defer poll.Stop()
	for p.newest(t) < begin+maxEntries {
		select {
		case <-done:
			return
		case <-poll.C:
		}
	}
	p.signal(t, syscall.SIGSTOP)
	defer p.signal(t, syscall.SIGCONT)
	<-done
}

func (p *pacer) signal(t *testing.T, signal os.Signal) {
	t.Helper()
	if err := p.engines.Signal(signal); err != nil {
		t.Fatal(err)
	}
}

// begin begins a call.
func begin(ctx context.Context, conn *grpc.ClientConn, method string, request proto.Message) (grpc.ClientStream, error) {
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method, grpc.ForceCodecV2(codec{}))
	if err != nil {
		return nil, err
	}
	return stream, errors.Join(stream.SendMsg(request), stream.CloseSend())
}

// receive reads until done.
func receive(stream grpc.ClientStream, read *answer, done func(*answer) bool) error {
	for !done(read) {
		if err := stream.RecvMsg(read); err != nil {
			return err
		}
	}
	return nil
}
