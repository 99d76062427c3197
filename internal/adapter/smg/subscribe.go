package smg

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/kvcast/kvcast/internal/adapter/apply"
	"github.com/kvcast/kvcast/internal/adapter/vllm"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/peer"
	smgv1 "github.com/kvcast/kvcast/internal/peer/smg/v1"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// services are those of engines that have SubscribeKvEvents.
var services = []string{
	"vllm.grpc.engine.VllmEngine", "sglang.grpc.scheduler.SglangScheduler", "trtllm.TrtllmService", "tokenspeed.grpc.scheduler.TokenSpeedScheduler",
}

// Descriptions returns the gRPC services of engines, with SubscribeKvEvents as the only method. A *Service implements them.
func Descriptions() (all []*grpc.ServiceDesc) {
	handler := func(service any, stream grpc.ServerStream) error { return service.(*Service).subscribe(stream) }
	for _, name := range services {
		all = append(all, &grpc.ServiceDesc{
			ServiceName: name, HandlerType: (*any)(nil),
			Streams: []grpc.StreamDesc{{StreamName: "SubscribeKvEvents", Handler: handler, ServerStreams: true}},
		})
	}
	return all
}

// subscribe serves a call of SubscribeKvEvents.
func (s *Service) subscribe(stream grpc.ServerStream) error {
	request := new(smgv1.SubscribeKvEventsRequest)
	if err := stream.RecvMsg(request); err != nil {
		return err
	}
	if err := peer.CheckTypes(request); err != nil {
		return status.Errorf(codes.InvalidArgument, "the request cannot be decoded: %v", err)
	}
	cursor := request.GetStartSequenceNumber()
	from := address(stream.Context())
	if s.slots.Reserve(from, 1) != nil {
		return status.Error(codes.ResourceExhausted, "too many streams of SubscribeKvEvents are open; try again later, or raise egress.smg.max_subscribers, of which an address may use three quarters")
	}
	defer s.slots.Release(from, 1)
	s.metrics.subscribers.Inc()
	defer s.metrics.subscribers.Dec()
	w, err := s.worker(authority(stream.Context()))
	if err != nil {
		return err
	}
	var next uint64
	if cursor != 0 {
		if next, err = s.position(w, cursor); err != nil {
			return err
		}
	}
	if err := stream.SendHeader(nil); err != nil { // gateways wait for it
		return err
	}
	if cursor == 0 {
		if next, err = s.sendState(stream, w); err != nil {
			return err
		}
	}
	return s.follow(stream, w, next)
}

// address returns the address of a subscriber.
func address(ctx context.Context) netip.Prefix {
	if p, ok := grpcpeer.FromContext(ctx); ok {
		return budget.ClientOf(p.Addr.String())
	}
	return netip.Prefix{}
}

func authority(ctx context.Context) string {
	md, _ := metadata.FromIncomingContext(ctx)
	if all := md.Get(":authority"); len(all) > 0 {
		return all[0]
	}
	return ""
}

// worker returns the worker that an authority names.
func (s *Service) worker(authority string) (*worker, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.running {
		return nil, status.Error(codes.Unavailable, "kvcast is starting and does not know the engines' caches yet; try again")
	}
	name, isSet := s.cfg.Workers[authority]
	if !isSet {
		name = s.named(authority)
	}
	w := s.workers[name]
	if w == nil {
		return nil, status.Errorf(codes.NotFound, "the authority %.256q names no worker that kvcast knows: want a worker's address for requests, its name, or an element of egress.smg.workers", authority)
	}
	return w, nil
}

// named returns the name of the worker whose address an authority is, or whose name. The caller holds the lock.
func (s *Service) named(authority string) string {
	var found []string
	for name, w := range s.workers {
		if w.address == authority && authority != "" {
			found = append(found, name)
		}
	}
	if len(found) > 0 {
		return slices.Min(found)
	}
	if s.workers[authority] != nil {
		return authority
	}
	name, _, err := net.SplitHostPort(authority)
	if err != nil {
		return ""
	}
	return name
}

// position returns the position from which a subscriber goes on that wants a sequence number.
func (s *Service) position(w *worker, seq uint64) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	from, ok := w.position(seq)
	if !ok {
		return 0, s.outOfRange("sequence number %d is not among the batches that are kept", seq)
	}
	return from, nil
}

func (s *Service) outOfRange(format string, args ...any) error {
	s.metrics.behind.Inc()
	return status.Error(codes.OutOfRange, fmt.Sprintf(format, args...)+"; subscribe from 0")
}

// follow sends the batches from a position on.
func (s *Service) follow(stream grpc.ServerStream, w *worker, from uint64) error {
	for {
		batches, changed, err := s.after(w, from)
		if err != nil {
			return err
		}
		if len(batches) > 0 {
			if err := s.send(stream, batches); err != nil {
				return err
			}
			from += uint64(len(batches))
			continue
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case <-s.stopped:
			return errStopped
		}
	}
}

// maxBatches is how many batches are taken from the history at once.
const maxBatches = 64

// after returns the next batches from a position on, and a channel that is closed when there are more.
func (s *Service) after(w *worker, from uint64) ([][]byte, <-chan struct{}, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if from < w.first {
		return nil, nil, s.outOfRange("the subscriber is %d batches behind those that are kept", w.first-from)
	}
	rest := w.history[from-w.first:]
	if len(rest) == 0 && w.ended {
		return nil, nil, status.Errorf(codes.Unavailable, "worker %s was removed", w.name)
	}
	var batches [][]byte
	for _, b := range rest[:min(len(rest), maxBatches)] {
		batches = append(batches, b.body)
	}
	return batches, w.changed, nil
}

var errStopped = status.Error(codes.Unavailable, "kvcast is shutting down")

// send sends batches, at least minPaceBytes in StallTimeout. SendMsg blocks while the subscriber does not read, until the call ends. So
// a goroutine calls it, which ends when the caller has ended the call.
func (s *Service) send(stream grpc.ServerStream, batches [][]byte) error {
	start, stall := time.Now(), time.NewTimer(s.cfg.StallTimeout)
	defer stall.Stop()
	sent := make(chan error, 1)
	go func() {
		var err error
		bytes := 0
		for i := 0; i < len(batches) && err == nil; i++ {
			ahead := time.Duration(float64(s.cfg.StallTimeout)*float64(bytes)/minPaceBytes) - time.Since(start) // of the least pace
			stall.Reset(s.cfg.StallTimeout + min(ahead, 0))
			m := new(emptypb.Empty)
			m.ProtoReflect().SetUnknown(batches[i])
			err = stream.SendMsg(m)
			bytes += len(batches[i])
		}
		sent <- err
	}()
	select {
	case err := <-sent:
		return err
	case <-stall.C:
		s.metrics.stalled.Inc()
		return status.Errorf(codes.ResourceExhausted, "the subscriber read nothing for %v (subscribers.stall), or less than %d MiB in this time; subscribe again, and read faster",
			s.cfg.StallTimeout, minPaceBytes>>20)
	case <-s.stopped:
		return errStopped
	}
}

// sendState sends all blocks of a worker, and returns the position of the batch that follows.
func (s *Service) sendState(stream grpc.ServerStream, w *worker) (from uint64, err error) {
	batches, from, err := s.state(stream.Context(), w)
	bytes := size(batches)
	defer s.shares.Release(address(stream.Context()), bytes)
	if err != nil {
		return 0, err
	}
	s.metrics.states.Inc()
	return from, s.send(stream, batches)
}

// outOfMemory returns the error for a state whose memory cannot be reserved when its batches have some bytes.
func (s *Service) outOfMemory(worker string, bytes int64) error {
	if limit := most(s.memory.Limit()); bytes > limit {
		return status.Errorf(codes.ResourceExhausted, "the blocks of worker %s alone take more than the %d bytes of egress.smg.state_bytes that are for one address, so that no subscriber can get them; raise it", worker, limit)
	}
	return status.Error(codes.ResourceExhausted, "the blocks that are being sent to other subscribers use all memory for that (egress.smg.state_bytes); try again later, or raise it")
}

func size(batches [][]byte) (n int64) {
	for _, b := range batches {
		n += int64(cap(b))
	}
	return n
}

// room is reserved at the end of a state's batch, for fields that are known when all batches are.
const room = 64

// state returns all blocks of a worker, in batches whose memory is reserved, and the position of the batch that follows. The
// sequence numbers of each rank's batches end with that of the rank's last batch. The state ends with two batches without events
// of each rank. A subscriber that has the first one has the blocks of all ranks, and continues from the second one or a later one,
// whether it names the last batch that it has or the next one.
func (s *Service) state(ctx context.Context, w *worker) (batches [][]byte, from uint64, err error) {
	of := address(ctx)
	if err := s.states.Acquire(ctx, of, 1); err != nil {
		return nil, 0, status.FromContextError(err).Err()
	}
	defer s.states.Release(of, 1)
	present, nexts := make(map[uint32]*vllm.Stream), make(map[uint32]uint64)
	s.mu.Lock()
	from = w.end()
	for rank, r := range w.ranks {
		present[rank], nexts[rank] = r.Present(), r.next
		r.resumable = r.next - 1
	}
	s.mu.Unlock()
	snapshot, ok := s.index.Snapshot(w.name)
	if !ok {
		return nil, 0, status.Errorf(codes.Unavailable, "worker %s was removed", w.name)
	}
	snapshot.TokenIDs = true
	at, blocks := apply.Now(), uint64(0)
	var rankOf []uint32 // of batches
	take := func(rank uint32, least int) error {
		if present[rank].Pending() < least {
			return nil
		}
		blocks += uint64(present[rank].Pending())
		m := newBatch(at, rank, present[rank].Take(), 0)
		b := appendBatch(make([]byte, 0, proto.Size(m)+room), m)
		if s.shares.Reserve(of, int64(cap(b))) != nil {
			return s.outOfMemory(w.name, size(batches)+int64(cap(b)))
		}
		batches, rankOf = append(batches, b), append(rankOf, rank)
		return nil
	}
	ranks := slices.Sorted(maps.Keys(present))
	for _, rank := range ranks { // clears, which gateways may apply to all ranks
		if err := take(rank, 0); err != nil {
			return batches, 0, err
		}
	}
	for _, rank := range ranks {
		err := apply.EachBlocks(ctx, &snapshot, rank, func(events []*kvcastv1.RouterEvent, _ int) error {
			for _, e := range events {
				present[rank].Apply(e)
			}
			return take(rank, stateBlocks)
		})
		if err == nil {
			err = take(rank, 1)
		}
		if err != nil {
			return batches, 0, err
		}
	}
	for _, rank := range slices.Concat(ranks, ranks) { // the end
		if err := take(rank, 0); err != nil {
			return batches, 0, err
		}
	}
	for i := len(batches) - 1; i >= 0; i-- {
		nexts[rankOf[i]]--
		batches[i] = appendBatch(batches[i], &smgv1.KvEventBatch{
			SequenceNumber: nexts[rankOf[i]],
			Snapshot:       &smgv1.KvSnapshot{Index: proto.Uint64(uint64(i)), Count: proto.Uint64(uint64(len(batches))), Blocks: &blocks},
		})
	}
	return batches, from, nil
}
