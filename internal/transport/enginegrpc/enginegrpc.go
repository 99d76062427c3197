// Package enginegrpc reads engines that stream their KV-cache events by gRPC.
//
// In: the responses of a call of SubscribeKvEvents, of SMG's protocol, of OpenEngine's or of LMCache's. Out: a transport.Receiver, whose messages
// are those that the engine would publish over ZeroMQ: a topic, which is empty unless the server tells its incarnation, the seq, and the batch in
// vLLM's form, of one dp rank. So all that follows, in particular package sequence, is the same for both.
//
// A call delivers every batch, in order. It begins with the last batch that was read before, if the server still has it, which shows
// whether the engine restarted. Otherwise it begins with the present state, if the server sends that, or with the next batch. The event
// of the connection says which of the two it is.
//
// Whatever servers send, memory is bounded: a response has at most transport.MaxPayloadBytes, and all calls of a Transport together
// have Config.Bytes for responses and for messages that wait to be processed. A call without memory does not read, so that flow control
// stops the server; nothing is dropped. A batch that cannot be converted becomes a message that does
// not decode, so that its seq is reported as lost. A response that is no batch ends the call.
package enginegrpc

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/ledger"
)

// protocols are the protocols by the transports of endpoints.
var protocols = map[string]*protocol{config.TransportSMG: &smg, config.TransportOpenEngine: &openEngine, config.TransportLMCache: &lmcache}

// conversions is how many responses are converted at a time. A conversion takes some 150 MB at most: see maxEvents and maxTokens.
const conversions = 2

// Config is the configuration of a Transport. Zero fields have defaults.
type Config struct {
	// Bytes bounds the memory of all calls together for responses, from when they have more than 128 KiB, and for messages that were
	// not processed. Default: 64 MiB.
	Bytes int64
	// Grace is how long a response may bring nothing while others wait for memory. Then the call ends, and the next one resumes.
	// Default: 1 s.
	Grace time.Duration
}

// Transport makes Receivers. It is safe for concurrent use.
type Transport struct {
	memory *ledger.Ledger
	// converters are those that are not in use. Whoever takes one returns it without waiting for anything else.
	converters chan *converter
	// ping is the time between two pings of LMCache's servers.
	ping time.Duration
}

// New returns a Transport.
func New(c Config) *Transport {
	t := &Transport{
		memory:     ledger.New(cmp.Or(c.Bytes, 64<<20), claimBytes(transport.MaxPayloadBytes), func() time.Duration { return cmp.Or(c.Grace, time.Second) }),
		converters: make(chan *converter, conversions),
		ping:       lmcachePing,
	}
	for range conversions {
		t.converters <- new(converter)
	}
	return t
}

// await waits until a claim is granted. It returns false if done is closed before.
func await(c *ledger.Claim, done <-chan struct{}) bool {
	select {
	case <-c.Granted():
		return true
	default:
	}
	select {
	case <-c.Granted():
		return true
	case <-done:
		return false
	}
}

// release releases the memory of a chunk.
func (t *Transport) release(c *transport.Chunk) {
	if claim, ok := c.Private.(*ledger.Claim); ok {
		t.memory.Release(claim)
		c.Private = nil
	}
}

// Subscription is what is read.
type Subscription struct {
	// Endpoint is smg://HOST:PORT, openengine://HOST:PORT or lmcache://HOST:PORT.
	Endpoint string
	// Model is the model that is read from a server of several models.
	Model string
	// Rank is the dp rank that is read. Batches of a rank that is not among Ranks, those of the whole source, are passed on as
	// transport.Message.Foreign by the subscription of the first of Ranks.
	Rank  uint32
	Ranks []uint32
	// Last is the last seq that was read; nil for none.
	Last *uint64
	// Epoch is the epoch in the topic of the last message that was read; empty for none.
	Epoch string
}

// Subscribe calls a server, once, in the background.
func (t *Transport) Subscribe(s Subscription) (transport.Receiver, error) {
	return t.subscribe(s, transport.ConnectTimeout)
}

// subscribe has the time that the server may take for each step of the beginning of a call.
func (t *Transport) subscribe(s Subscription, timeout time.Duration) (transport.Receiver, error) {
	e, ok := config.ParseSource(s.Endpoint)
	p := protocols[e.Transport]
	if !ok || p == nil {
		return nil, fmt.Errorf("parse endpoint %q: want smg://HOST:PORT, openengine://HOST:PORT or lmcache://HOST:PORT", s.Endpoint)
	}
	r := transport.NewQueue(t.release)
	_, address := e.Net()
	c := &call{
		transport: t, receiver: r, protocol: p, address: address, rank: s.Rank, ranks: s.Ranks, model: s.Model, epoch: s.Epoch, timeout: timeout,
		reportsForeign: len(s.Ranks) > 0 && s.Rank == slices.Min(s.Ranks),
	}
	// The seq of a request is the one before the first wanted. 0 means none, which is nothing else if there is no batch before.
	if s.Last != nil && (*s.Last > 1 || *s.Last > 0 && p.beginsAtOne) {
		c.from = *s.Last
	}
	r.Go(c.run)
	return r, nil
}
