package limits

import (
	"errors"
	"fmt"
	"testing"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// The numbers of entries and snapshot_end in SubscribeResponse and SnapshotResponse.
const (
	entriesField     = 1
	snapshotEndField = 9
)

// answer is what the answers of a call have had.
type answer struct{ entries, ends int }

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
		number, _, n := protowire.ConsumeField(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		if number == entriesField {
			a.entries++
		}
		if number == snapshotEndField {
			a.ends++
		}
		b = b[n:]
	}
	return nil
}

// readAll begins all subscriptions and snapshots at the same time, each by a connection of its own. It returns when each snapshot is complete, and each subscription
// has read its snapshot and wantEntries entries after it. Slow subscribers read nothing until the others are done. The server may end their streams before.
func readAll(t *testing.T, addr string) {
	t.Helper()
	var clients, slow errgroup.Group
	read := make(chan struct{})
	for i := range subscribers + snapshots {
		conn := harness.Dial(t, addr)
		switch {
		case i < slowSubscribers:
			slow.Go(func() error {
				stream, err := begin(t, conn, kvcastv1.RouterEventService_Subscribe_FullMethodName, &kvcastv1.SubscribeRequest{})
				if err != nil {
					return fmt.Errorf("slow subscriber %d: %w", i, err)
				}
				<-read
				_ = receive(stream, wantEntries)
				return nil
			})
		case i < subscribers:
			clients.Go(func() error {
				stream, err := begin(t, conn, kvcastv1.RouterEventService_Subscribe_FullMethodName, &kvcastv1.SubscribeRequest{})
				if err == nil {
					err = receive(stream, wantEntries)
				}
				if err != nil {
					return fmt.Errorf("subscriber %d: %w", i, err)
				}
				return nil
			})
		default:
			clients.Go(func() error {
				stream, err := begin(t, conn, kvcastv1.RouterEventService_Snapshot_FullMethodName, &kvcastv1.SnapshotRequest{})
				if err == nil {
					err = receive(stream, 0)
				}
				if err != nil {
					return fmt.Errorf("snapshot %d: %w", i-subscribers, err)
				}
				return nil
			})
		}
	}
	err := clients.Wait()
	close(read)
	if err := errors.Join(err, slow.Wait()); err != nil {
		t.Error(err)
	}
}

// begin begins a call.
func begin(t *testing.T, conn *grpc.ClientConn, method string, request proto.Message) (grpc.ClientStream, error) {
	t.Helper()
	stream, err := conn.NewStream(harness.Context(t), &grpc.StreamDesc{ServerStreams: true}, method, grpc.ForceCodecV2(codec{}))
	if err != nil {
		return nil, err
	}
	return stream, errors.Join(stream.SendMsg(request), stream.CloseSend())
}

// receive reads until a snapshot and some entries have come.
func receive(stream grpc.ClientStream, entries int) error {
	for read := new(answer); read.ends == 0 || read.entries < entries; {
		if err := stream.RecvMsg(read); err != nil {
			return err
		}
	}
	return nil
}
