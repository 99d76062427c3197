//go:build cgo

package bench_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/test/harness"
)

// topic has the form that llm-d uses. Its length adds to every message.
const topic = "kv@10.0.0.5@" + modelName

// publisher publishes pre-encoded payloads with libzmq, as engines do. It waits for a slow subscriber
// instead of dropping messages.
type publisher struct {
	zctx     *zmq4.Context
	socket   *zmq4.Socket // XPUB: a PUB socket that receives subscriptions, also those of further subscribers
	endpoint string
	seq      uint64 // of the next message
	seqFrame [8]byte
}

// newPublisher returns a publisher bound to a free port of all addresses.
func newPublisher() (*publisher, error) {
	zctx, err := zmq4.NewContext()
	if err != nil {
		return nil, err
	}
	p := &publisher{zctx: zctx}
	if p.socket, err = zctx.NewSocket(zmq4.XPUB); err != nil {
		return nil, errors.Join(err, zctx.Term())
	}
	if err = errors.Join(
		p.socket.SetSndhwm(10_000), p.socket.SetXpubNodrop(true), p.socket.SetXpubVerbose(1), p.socket.SetLinger(0),
		p.socket.SetRcvtimeo(harness.Timeout), p.socket.SetSndtimeo(harness.Timeout), p.socket.Bind("tcp://0.0.0.0:*"),
	); err == nil {
		p.endpoint, err = p.socket.GetLastEndpoint()
		p.endpoint = strings.Replace(p.endpoint, "0.0.0.0", "127.0.0.1", 1)
	}
	if err != nil {
		return nil, closeAfter(fmt.Errorf("open publisher: %w", err), p)
	}
	return p, nil
}

// endpointOf returns the endpoint at an address of the loopback interface for each of less than 255 workers, since no two
// workers may read one endpoint.
func (p *publisher) endpointOf(worker int) string {
	return strings.Replace(p.endpoint, "127.0.0.1", fmt.Sprintf("127.0.0.%d", worker+1), 1)
}

// subscribed waits for a subscriber.
func (p *publisher) subscribed() error {
	message, err := p.socket.RecvBytes(0)
	if err == nil && (len(message) == 0 || message[0] != 1) {
		err = fmt.Errorf("got %q", message)
	}
	if err != nil {
		return fmt.Errorf("await subscription: %w", err)
	}
	return nil
}

// send publishes a payload, which is copied.
func (p *publisher) send(payload []byte) error {
	binary.BigEndian.PutUint64(p.seqFrame[:], p.seq)
	_, err := p.socket.Send(topic, zmq4.SNDMORE)
	if err == nil {
		_, err = p.socket.SendBytes(p.seqFrame[:], zmq4.SNDMORE)
	}
	if err == nil {
		_, err = p.socket.SendBytes(payload, 0)
	}
	if err != nil {
		return fmt.Errorf("publish batch %d: %w", p.seq, err)
	}
	p.seq++
	return nil
}

// Close closes the socket.
func (p *publisher) Close() error { return errors.Join(p.socket.Close(), p.zctx.Term()) }
