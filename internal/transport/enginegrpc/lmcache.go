package enginegrpc

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"

	lmcachev1 "github.com/kvcast/kvcast/internal/peer/lmcache/v1"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/lmcachezmq"
	"github.com/kvcast/kvcast/internal/wire"
)

// lmcache is the protocol of LMCache's multiprocess server, which keeps a log of what its memory has stored and removed. Its records of
// one model become batches of one event.
//
// The seq of a record counts those of all models. A response says up to which seq it has all of the model: there is an empty batch
// for each record of another model, so that seqs are contiguous. Of records that are lost, the last becomes a batch that does not decode, and
// so is reported as lost with those before. The epoch of the topic is the server's incarnation.
var lmcache = protocol{
	methods:     []string{"/lmcache.mp.ObservabilityService/SubscribeKvEvents"},
	request:     newLMCacheRequest,
	how:         "; want lmcache 0.5.6 or later",
	open:        openLMCache,
	beginsAtOne: true,
	refuses:     refusesLMCache,
	pass:        passLMCache,
	event:       (*converter).lmcacheEvent,
	alive:       keepLMCache,
}

const (
	// lmcacheEvents is the most records of a response, of which a server allows 1024: a response with stores of chunks of 4,096 tokens stays below 1 MiB.
	lmcacheEvents = 64
	// lmcachePing is the time between two pings. Without one for 30 s or more, 120 s by default, a server ends the call.
	lmcachePing = 10 * time.Second
	// maxOfOtherModels bounds the empty batches of a response, each for a record of another model. It is the default length of a server's log.
	// Beyond it, records between two of the model are reported as lost, except for the last of them.
	maxOfOtherModels = 1 << 15
	// lmcacheChunk and lmcacheChunkBytes are how many messages are passed on together, and how many bytes from which on none is added.
	lmcacheChunk      = 128
	lmcacheChunkBytes = 256 << 10
	// lmcachePong is the size of the largest response of a ping.
	lmcachePong = 1 << 10
)

// newLMCacheRequest returns a SubscribeKvEventsRequest. The call has an identifier of its own, since a server has one call of each.
func newLMCacheRequest(c *call) []byte {
	c.instance = rand.Int64()
	c.cursor = max(c.from, 1) - 1
	return encoded(&lmcachev1.SubscribeKvEventsRequest{
		InstanceId: c.instance, ModelName: c.model, Cursor: int64(min(c.cursor, math.MaxInt64)), MaxEvents: lmcacheEvents,
	})
}

// openLMCache returns a connection of the server's transport: servers begin with a greeting of ZeroMQ, or are called by gRPC.
func openLMCache(c *call) (connection, error) {
	c.mayDial.Store(true)
	opened, err := c.dialTCP(c.receiver.Context(), c.address)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(c.receiver.Context(), func() { _ = opened.Close() })
	defer stop()
	n, ok := lmcachezmq.Greets(opened)
	if ok {
		return lmcachezmq.New(n), nil
	}
	_ = n.Close()
	return c.open()
}

// ReadLMCacheGreeting is ReadGreeting for a server of LMCache, of either transport.
func ReadLMCacheGreeting(c net.Conn) error {
	n, ok := lmcachezmq.Greets(c)
	if ok {
		return nil
	}
	return ReadGreeting(n)
}

// keepLMCache pings the server, so that it keeps the call.
func keepLMCache(ctx context.Context, c *call, conn connection) {
	ping := encoded(&lmcachev1.PingRequest{InstanceId: &c.instance})
	ticker := time.NewTicker(c.transport.ping)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		limited, cancel := context.WithTimeout(ctx, c.timeout)
		var response []byte
		_ = conn.Invoke(limited, "/lmcache.mp.ControllerService/Ping", ping, &response, grpc.MaxCallRecvMsgSize(lmcachePong)) // if the server ends the call, the next one resumes
		cancel()
		if connection := c.conn.Load(); connection != nil {
			connection.answered()
		}
	}
}

// lmcacheBatch is a KVEventBatch without its records.
type lmcacheBatch struct {
	enabled, lost     bool
	incarnation, next uint64
	first             uint64 // seq of the first record; 0 if there is none
}

var errLMCacheOff = errors.New("LMCache's server keeps no log of events; want --kv-event-log-size above 0, and its event bus")

// readLMCache reads a KVEventBatch without its records.
func readLMCache(response []byte) (b lmcacheBatch, err error) {
	f := fields{rest: response}
	for f.next() {
		switch {
		case f.IsVarint(lmcachev1.KVEventBatchEnabledField):
			b.enabled = f.Value != 0
		case f.IsVarint(lmcachev1.KVEventBatchIncarnationField):
			b.incarnation = f.Value
		case f.IsVarint(lmcachev1.KVEventBatchNextCursorField):
			b.next = f.Value
		case f.IsVarint(lmcachev1.KVEventBatchLostField):
			b.lost = f.Value != 0
		case f.IsBytes(lmcachev1.KVEventBatchEventsField) && b.first == 0:
			b.first, f.err = lmcacheSeq(f.Bytes)
		}
	}
	switch {
	case f.err != nil:
		return b, f.err
	case !b.enabled:
		return b, errLMCacheOff
	case b.next > math.MaxInt64:
		return b, fmt.Errorf("next_cursor is %d; want 0 or more", int64(b.next))
	}
	return b, nil
}

// lmcacheSeq returns the seq of a KVEventRecord.
func lmcacheSeq(record []byte) (seq uint64, err error) {
	f := fields{rest: record}
	for f.next() {
		if f.IsVarint(lmcachev1.KVEventRecordSeqField) {
			seq = f.Value
		}
	}
	if f.err == nil && (seq == 0 || seq > math.MaxInt64) {
		f.err = fmt.Errorf("the seq of a record is %d; want 1 or more", int64(seq))
	}
	return seq, f.err
}

// refusesLMCache returns errCannotResume if the server has restarted since the last record that was read. Its response then begins after that
// record's seq, so that the first records of the new incarnation are missing: the call must begin anew.
func refusesLMCache(c *call, response []byte) error {
	b, err := readLMCache(response)
	if err == nil && (c.epoch != "" && c.epoch != epochOf(b.incarnation) || b.next < c.cursor) {
		return errors.Join(errCannotResume, errRestarted)
	}
	return nil
}

var errRestarted = errors.New("LMCache's server has restarted")

func epochOf(incarnation uint64) string { return strconv.FormatUint(incarnation, 10) }

// passLMCache passes on the records of a KVEventBatch.
func passLMCache(c *call, response []byte) error {
	b, err := readLMCache(response)
	topic := []byte(wire.TopicWithEpoch("", epochOf(b.incarnation)))
	switch {
	case errors.Is(err, errLMCacheOff):
		return err
	case err != nil:
		return malformed(err)
	case c.topic != nil && string(c.topic) != string(topic), b.next < c.cursor:
		return fmt.Errorf("%w: %w", transport.ErrLost, errRestarted)
	}
	c.topic = topic
	p := lmcachePass{call: c}
	if b.lost { // the records before the first one, or all
		if last := cmp.Or(b.first, b.next+1) - 1; last > c.cursor {
			c.cursor = last - 1
			if err := p.add(binary.BigEndian.AppendUint64([]byte{neverUsed}, last)); err != nil {
				return err
			}
		}
	}
	for f := (fields{rest: response}); f.next(); {
		if !f.IsBytes(lmcachev1.KVEventBatchEventsField) {
			continue
		}
		if err := p.record(f.Bytes, b.next); err != nil {
			return err
		}
	}
	if err := p.fill(b.next); err != nil {
		return err
	}
	return p.flush()
}

func malformed(err error) error {
	return fmt.Errorf("%w: a response is malformed: %w", transport.ErrLost, err)
}

// lmcachePass passes on the records of a response.
type lmcachePass struct {
	*call
	messages []transport.Message
	bytes    int    // of their payloads
	filled   uint64 // number of empty batches
	empty    []byte // the payload of an empty batch
}

// record passes on a record, whose seq is at most last.
func (p *lmcachePass) record(record []byte, last uint64) error {
	seq, err := lmcacheSeq(record)
	switch {
	case err != nil:
		return malformed(err)
	case seq <= p.cursor || seq > last:
		return malformed(fmt.Errorf("a record has the seq %d; want %d to %d", seq, p.cursor+1, last))
	}
	if err := p.fill(seq - 1); err != nil {
		return err
	}
	converter, err := p.takeConverter()
	if err != nil {
		return err
	}
	payload, _ := converter.convert(header{rank: p.rank, events: [][]byte{record}}, record) // without decoding, the batch is reported as lost
	p.returnConverter(converter)
	return p.add(payload)
}

// fill passes on empty batches up to a seq, or only the last one if the response then has more than maxOfOtherModels.
func (p *lmcachePass) fill(to uint64) error {
	if p.empty == nil {
		b := wire.Batch{Rank: p.rank, HasRank: true}
		p.empty = new(wire.Encoder).AppendBatch(nil, &b)
	}
	if to > p.cursor && to-p.cursor > maxOfOtherModels-min(p.filled, maxOfOtherModels) {
		p.cursor = to - 1
	}
	for ; p.cursor < to; p.filled++ {
		if err := p.add(p.empty); err != nil {
			return err
		}
	}
	return nil
}

// add passes on the batch after p.cursor.
func (p *lmcachePass) add(payload []byte) error {
	p.cursor++
	p.messages = append(p.messages, transport.Message{
		Conn: 1, Count: 3, Frames: [][]byte{p.topic, binary.BigEndian.AppendUint64(nil, p.cursor), payload},
	})
	if p.bytes += len(payload); len(p.messages) < lmcacheChunk && p.bytes < lmcacheChunkBytes {
		return nil
	}
	return p.flush()
}

// flush passes on the messages of one chunk.
func (p *lmcachePass) flush() error {
	if len(p.messages) == 0 {
		return nil
	}
	chunk := &transport.Chunk{Messages: p.messages}
	p.messages, p.bytes = nil, 0
	return p.push(chunk)
}

// areUint32s reports whether no number of a repeated field of 64 bits, packed or not, has more than 32.
func areUint32s(f *fields) bool {
	if f.Type == protowire.VarintType {
		return f.Value <= math.MaxUint32
	}
	for b := f.Bytes; len(b) > 0; {
		v, n := protowire.ConsumeVarint(b)
		if n < 0 || v > math.MaxUint32 {
			return false
		}
		b = b[n:]
	}
	return true
}

// lmcacheEvent adds a KVEventRecord. Its chunks are in the memory of the server, which is the external tier of the engines.
func (c *converter) lmcacheEvent(record []byte) error {
	e := wire.Event{Medium: "EXTERNAL"}
	var kind string
	hashes, tokens := len(c.hashes), len(c.tokens)
	f := fields{rest: record}
	for f.next() {
		switch {
		case f.IsBytes(lmcachev1.KVEventRecordKindField):
			f.text(&kind)
		case f.IsBytes(lmcachev1.KVEventRecordBlockHashesField):
			f.err = c.addHash(hashOf(f.Bytes))
		case f.IsBytes(lmcachev1.KVEventRecordParentBlockHashField):
			e.Parent, e.HasParent = hashOf(f.Bytes), true
		case f.Number == lmcachev1.KVEventRecordTokenIDsField:
			c.tokens = appendUints(&f, lmcachev1.KVEventRecordTokenIDsField, c.tokens, maxTokens)
			if f.err == nil && !areUint32s(&f) {
				f.err = errors.New("a token id has more than 32 bits")
			}
		}
	}
	if f.err != nil {
		return f.err
	}
	e.BlockHashes = c.hashes[hashes:len(c.hashes):len(c.hashes)]
	switch kind {
	case "stored":
		e.Kind = wire.KindStored
		e.Tokens = c.tokens[tokens:len(c.tokens):len(c.tokens)]
		if len(e.BlockHashes) > 0 {
			e.BlockSize = uint32(len(e.Tokens) / len(e.BlockHashes))
		}
	case "removed":
		e.Kind = wire.KindRemoved
	default:
		return fmt.Errorf("the kind of a record is %q; want stored or removed", kind)
	}
	return c.add(e)
}
