package bench_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// subscriber is a router with its own connection. It counts entries without decoding them, and ends with an error unless the positions chain and each response has as many entries
// as its position implies.
type subscriber struct {
	conn   *grpc.ClientConn
	cancel context.CancelFunc
	done   chan struct{} // closed when the stream has ended
	err    error         // set before done is closed

	began uint64        // position at which the stream started
	seq   atomic.Uint64 // of the last position
	moved chan<- struct{}
	// observe, if set, is called with each message and its arrival time.
	observe func(raw []byte, at time.Time) error
}

func dial(addr string) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient(addr,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(newCodec())))
	if err != nil {
		return nil, fmt.Errorf("connect to server: %w", err)
	}
	return conn, nil
}

// openStream calls a server-streaming method.
func openStream(ctx context.Context, conn *grpc.ClientConn, method string, req any) (grpc.ClientStream, error) {
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method)
	if err == nil {
		err = stream.SendMsg(req)
	}
	if err == nil {
		err = stream.CloseSend()
	}
	if err != nil {
		return nil, fmt.Errorf("call %s: %w", method, err)
	}
	return stream, nil
}

func fromLatest() *kvcastv1.SubscribeRequest {
	return &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_Latest{Latest: &kvcastv1.FromLatest{}}}
}

func fromEarliest() *kvcastv1.SubscribeRequest {
	return &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}}}
}

// subscribe returns a subscriber that the server has accepted. After each message the subscriber
// sends to moved without blocking.
func subscribe(addr string, req *kvcastv1.SubscribeRequest, moved chan<- struct{}, observe func([]byte, time.Time) error) (*subscriber, error) {
	conn, err := dial(addr)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &subscriber{conn: conn, cancel: cancel, done: make(chan struct{}), moved: moved, observe: observe}
	stream, err := openStream(ctx, conn, kvcastv1.RouterEventService_Subscribe_FullMethodName, req)
	f := &frame{keep: observe != nil}
	if err == nil {
		err = stream.RecvMsg(f) // Accepted, whose position is the start
	}
	if err == nil && f.fields[fieldPosition] != 1 {
		err = errors.New("subscribe: the first message has no position")
	}
	if err != nil {
		cancel()
		return nil, errors.Join(err, conn.Close())
	}
	s.began = f.position
	s.seq.Store(f.position)
	go func() {
		defer close(s.done)
		s.err = s.follow(ctx, stream, f)
		s.notify()
	}()
	return s, nil
}

func (s *subscriber) follow(ctx context.Context, stream grpc.ClientStream, f *frame) error {
	for {
		err := stream.RecvMsg(f)
		if err != nil {
			select {
			case <-ctx.Done(): // the subscriber was closed
				return nil
			default:
				return fmt.Errorf("receive entries: %w", err)
			}
		}
		at := time.Now()
		last := s.seq.Load()
		if f.fields[fieldPosition] != 1 || f.prevSeq != last || f.position != last+uint64(f.fields[fieldEntries]) {
			return fmt.Errorf("check entries: %d of them after %d, with the position %d after %d",
				f.fields[fieldEntries], last, f.position, f.prevSeq)
		}
		if s.observe != nil {
			if err := s.observe(f.raw, at); err != nil {
				return err
			}
		}
		s.seq.Store(f.position)
		s.notify()
	}
}

func (s *subscriber) notify() {
	select {
	case s.moved <- struct{}{}:
	default:
	}
}

// ended returns the error that the subscriber ended with, or nil.
func (s *subscriber) ended() error {
	select {
	case <-s.done:
		if s.err == nil {
			return errors.New("subscriber has ended")
		}
		return s.err
	default:
		return nil
	}
}

// Close cancels the stream.
func (s *subscriber) Close() error {
	s.cancel()
	<-s.done
	return errors.Join(s.err, s.conn.Close())
}

// snapshotRead is the result of reading a snapshot.
type snapshotRead struct {
	bytes, pieces int
	entries       int
	end           uint64 // position
}

// readSnapshot reads a whole snapshot. It decodes the messages only if each is not nil.
func readSnapshot(ctx context.Context, conn *grpc.ClientConn, each func(raw []byte) error) (r snapshotRead, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := openStream(ctx, conn, kvcastv1.RouterEventService_Snapshot_FullMethodName, &kvcastv1.SnapshotRequest{})
	if err != nil {
		return r, err
	}
	ends := 0
	f := &frame{keep: each != nil}
	for {
		err := stream.RecvMsg(f)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return r, fmt.Errorf("receive snapshot: %w", err)
		}
		if each != nil {
			if err := each(f.raw); err != nil {
				return r, err
			}
		}
		r.bytes += f.bytes
		r.pieces += f.fields[fieldSnapshotBlocks]
		r.entries += f.fields[fieldEntries]
		ends += f.fields[fieldSnapshotEnd]
		r.end = f.position
	}
	if ends != 1 || r.end == 0 {
		return r, fmt.Errorf("check snapshot: it has %d ends, the last at %d", ends, r.end)
	}
	return r, nil
}
