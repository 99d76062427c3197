package enginegrpc

import (
	"errors"
	"time"

	"github.com/kvcast/kvcast/internal/transport"
)

// Converted is what a response becomes.
type Converted struct {
	Seq     uint64
	Rank    uint32
	Ignored bool
	Payload []byte
}

// Convert reads a response of the protocol with a transport's name.
func Convert(protocol string, response []byte) (Converted, error) {
	return NewConverter(protocol)(response)
}

// NewConverter returns a Convert that reuses its memory.
func NewConverter(protocol string) func(response []byte) (Converted, error) {
	p := protocols[protocol]
	c := converter{protocol: p}
	return func(response []byte) (Converted, error) {
		h, err := p.read(response)
		if err = errors.Join(err, h.ended); err != nil {
			return Converted{}, err
		}
		payload, err := c.convert(h, response)
		return Converted{h.seq, h.rank, h.ignored, payload}, err
	}
}

// SubscribeWithin subscribes with a time limit for each step of the beginning of a call.
func (t *Transport) SubscribeWithin(s Subscription, timeout time.Duration) (transport.Receiver, error) {
	return t.subscribe(s, timeout)
}

// SetPing sets the time between two pings.
func (t *Transport) SetPing(every time.Duration) { t.ping = every }

// Used returns the memory in use, and Waiting the number of responses that wait for memory.
func (t *Transport) Used() int64  { return t.memory.Used() }
func (t *Transport) Waiting() int { return t.memory.Waiting() }

// ClaimBytes returns the memory of a response of so many bytes.
func ClaimBytes(n int) int64 { return claimBytes(n) }

// PassLMCache passes on responses of LMCache's server, and calls message with each message. It returns the error that ends the call.
func PassLMCache(responses [][]byte, message func(transport.Message)) (err error) {
	t := New(Config{})
	r := transport.NewQueue(t.release)
	defer r.Interrupt()
	c := &call{transport: t, receiver: r, protocol: &lmcache, timeout: time.Minute}
	go func() {
		for _, response := range responses {
			if err = passLMCache(c, response); err != nil {
				break
			}
		}
		r.End(transport.ErrEnded)
	}()
	for {
		chunk, ended := r.Next(func() time.Time { return time.Time{} })
		if ended != nil {
			return err
		}
		for _, m := range chunk.Messages {
			message(m)
		}
		r.Recycle(chunk)
	}
}
