//go:build cgo

package bench_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

func init() { roles["bare relay"] = newBareRelay }

const (
	// relayEpoch is the epoch of the bare relay's positions. It has the length of a server's.
	relayEpoch = "0123456789abcdef"
	// relayQueue is the number of responses that a subscriber of the bare relay may be behind, beyond which
	// the relay waits for it.
	relayQueue = 1_000
)

// bareRelay is a child that does the least that a relay from libzmq to gRPC can do: it receives batches with the code
// of ingest, decodes them, hashes tokens, encodes an Entry per batch, and sends each response, of up to batchMessages
// entries, to all subscribers. A response is encoded once. There is no block table, journal, index, repair or
// snapshot; only stores become events.
type bareRelay struct {
	*batchReceive
	decoder wire.Decoder
	hashes  []uint64
	// event and entry are reused to encode an event and an entry.
	event, entry []byte
	// eventID and last are the id of the last event and the seq of its entry. They start at 1, as after a WorkerAdded.
	eventID, last uint64

	grpc     *grpc.Server
	listener net.Listener
	served   chan error

	mu      sync.Mutex // guards streams
	streams []*relayStream
}

// relayStream is a subscriber of a bareRelay.
type relayStream struct {
	responses chan []byte
	pending   sync.WaitGroup // responses that are not sent
}

func newBareRelay(s childSetup) (work, error) {
	receive, err := newBatchReceive(s, (*batchReceive).wait)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // returns at once
	if err != nil {
		return nil, errors.Join(err, receive.Close())
	}
	r := &bareRelay{
		batchReceive: receive.(*batchReceive), eventID: 1, last: 1, listener: l, served: make(chan error, 1),
		grpc: grpc.NewServer(grpc.ForceServerCodecV2(rawCodec{newCodec()})),
	}
	r.grpc.RegisterService(&grpc.ServiceDesc{
		ServiceName: kvcastv1.RouterEventService_ServiceDesc.ServiceName, HandlerType: (*any)(nil),
		Streams: []grpc.StreamDesc{{StreamName: "Subscribe", Handler: r.subscribe, ServerStreams: true}},
	}, r)
	go func() { r.served <- r.grpc.Serve(l) }()
	return r, nil
}

func (r *bareRelay) address() string { return r.listener.Addr().String() }

// subscribe is the handler of Subscribe, which ignores the request.
func (r *bareRelay) subscribe(_ any, stream grpc.ServerStream) error {
	if err := stream.RecvMsg(&kvcastv1.SubscribeRequest{}); err != nil {
		return err
	}
	position := &kvcastv1.Position{Epoch: relayEpoch, Seq: r.last}
	if err := stream.SendMsg(&kvcastv1.SubscribeResponse{
		Accepted: &kvcastv1.Accepted{Epoch: relayEpoch}, Position: position, PrevSeq: position.Seq,
	}); err != nil {
		return err
	}
	s := &relayStream{responses: make(chan []byte, relayQueue)}
	r.mu.Lock()
	r.streams = append(r.streams, s)
	r.mu.Unlock()
	for {
		select {
		case data := <-s.responses:
			err := stream.SendMsg(data)
			s.pending.Done()
			if err != nil {
				return err
			}
		case <-stream.Context().Done():
			return nil
		}
	}
}

// do relays n batches, and returns the number of responses once they are sent to all subscribers.
func (r *bareRelay) do(n int) (responses uint64, err error) {
	r.mu.Lock()
	streams := slices.Clone(r.streams)
	r.mu.Unlock()
	var size int
	for got := 0; got < n; {
		r.batch.Release()
		if err := r.socket.Receive(r.batch); err != nil {
			return 0, fmt.Errorf("receive message %d: %w", r.seq, err)
		}
		taken := r.batch.Len()
		if taken == 0 {
			if err := r.wait(); err != nil {
				return 0, fmt.Errorf("wait for message %d: %w", r.seq, err)
			}
			continue
		}
		got += taken
		prev := r.last
		response := make([]byte, 0, size)
		for _, m := range r.batch.Messages() {
			if m.Count != 3 || len(m.Frames[1]) != 8 || binary.BigEndian.Uint64(m.Frames[1]) != r.seq {
				return 0, fmt.Errorf("receive message %d: got %x", r.seq, m.Frames)
			}
			r.seq++
			if response, err = r.appendEntry(response, m.Frames[2]); err != nil {
				return 0, err
			}
		}
		if response, err = (proto.MarshalOptions{}).MarshalAppend(response, &kvcastv1.SubscribeResponse{
			Position: &kvcastv1.Position{Epoch: relayEpoch, Seq: r.last}, PrevSeq: prev,
		}); err != nil {
			return 0, err
		}
		size = max(size, len(response))
		responses++
		for _, s := range streams {
			s.pending.Add(1)
			s.responses <- response
		}
	}
	for _, s := range streams {
		s.pending.Wait()
	}
	return responses, nil
}

// appendEntry appends the entry of a batch to a response.
func (r *bareRelay) appendEntry(response, payload []byte) ([]byte, error) {
	batch, err := r.decoder.Decode(payload)
	if err != nil {
		return nil, fmt.Errorf("decode message %d: %w", r.seq-1, err)
	}
	r.last++
	e := protowire.AppendTag(r.entry[:0], kvcastv1.EntrySeqField, protowire.Fixed64Type)
	e = protowire.AppendFixed64(e, r.last)
	e = protowire.AppendTag(e, kvcastv1.EntryWorkerField, protowire.BytesType)
	e = protowire.AppendString(e, workerName)
	e = protowire.AppendTag(e, kvcastv1.EntryModelField, protowire.BytesType)
	e = protowire.AppendString(e, modelName)
	e = protowire.AppendTag(e, kvcastv1.EntryEngineTimeUnixNanoField, protowire.Fixed64Type)
	e = protowire.AppendFixed64(e, uint64(batch.Time*1e9))
	e = protowire.AppendTag(e, kvcastv1.EntryIngestTimeUnixNanoField, protowire.Fixed64Type)
	e = protowire.AppendFixed64(e, uint64(time.Now().UnixNano()))
	for i := range batch.Events {
		if batch.Events[i].Kind == wire.KindStored {
			r.encodeStored(batch.Rank, &batch.Events[i])
			e = protowire.AppendTag(e, kvcastv1.EntryEventsField, protowire.BytesType)
			e = protowire.AppendBytes(e, r.event)
		}
	}
	r.entry = e
	response = protowire.AppendTag(response, kvcastv1.ResponseEntriesField, protowire.BytesType)
	return protowire.AppendBytes(response, e), nil
}

// encodeStored sets r.event to the encoded event of a store.
func (r *bareRelay) encodeStored(rank uint32, ev *wire.Event) {
	r.hashes = kvblock.AppendTokensHashes(r.hashes[:0], ev.Tokens, int(ev.BlockSize), kvblock.Seed(ev.LoRAName, ev.CacheSalt), ev.Eagle, nil)
	r.eventID++
	b := protowire.AppendTag(r.event[:0], kvcastv1.RouterEventEventIDField, protowire.VarintType)
	b = protowire.AppendVarint(b, r.eventID)
	b = protowire.AppendTag(b, kvcastv1.RouterEventDpRankField, protowire.VarintType)
	b = protowire.AppendVarint(b, uint64(rank))
	b = protowire.AppendTag(b, kvcastv1.RouterEventTierField, protowire.VarintType)
	b = protowire.AppendVarint(b, uint64(kvcastv1.Tier_TIER_DEVICE))
	size := 1 + protowire.SizeBytes(8*len(ev.BlockHashes)) + 1 + protowire.SizeBytes(8*len(r.hashes)) +
		1 + protowire.SizeVarint(uint64(ev.BlockSize))
	if ev.HasParent {
		size += 1 + 8
	}
	b = protowire.AppendTag(b, kvcastv1.RouterEventStoredField, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(size))
	if ev.HasParent {
		b = protowire.AppendTag(b, kvcastv1.StoredParentHashField, protowire.Fixed64Type)
		b = protowire.AppendFixed64(b, ev.Parent)
	}
	b = appendFixed64s(b, kvcastv1.StoredBlockHashesField, ev.BlockHashes)
	b = appendFixed64s(b, kvcastv1.StoredTokensHashesField, r.hashes)
	b = protowire.AppendTag(b, kvcastv1.StoredBlockSizeField, protowire.VarintType)
	r.event = protowire.AppendVarint(b, uint64(ev.BlockSize))
}

func appendFixed64s(b []byte, field protowire.Number, values []uint64) []byte {
	b = protowire.AppendTag(b, field, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(8*len(values)))
	for _, v := range values {
		b = protowire.AppendFixed64(b, v)
	}
	return b
}

// Close stops the server and closes the socket.
func (r *bareRelay) Close() error {
	r.grpc.Stop()
	return errors.Join(<-r.served, r.batchReceive.Close())
}

// rawCodec sends encoded messages unchanged.
type rawCodec struct{ codec }

// Marshal implements encoding.CodecV2.
func (c rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	if data, ok := v.([]byte); ok {
		return mem.BufferSlice{mem.SliceBuffer(data)}, nil
	}
	return c.codec.Marshal(v)
}
