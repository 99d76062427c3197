package bench_test

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/pebbe/zmq4"
)

// topic is as llm-d has it; its length is in every message.
const topic = "kv@10.0.0.5@" + modelName

// publisher is an engine's PUB socket, with as little beside it as can be:
// payloads are made beforehand. Where a subscriber is too slow, it waits instead
// of dropping.
type publisher struct {
	zctx     *zmq4.Context
	socket   *zmq4.Socket
	endpoint string
	topic    []byte
	seq      uint64 // of the next message
	seqFrame [8]byte
}

// newPublisher returns a publisher bound to a port of its own.
func newPublisher() (*publisher, error) {
	zctx, err := zmq4.NewContext()
	if err != nil {
		return nil, fmt.Errorf("open publisher: %w", err)
	}
	p := &publisher{zctx: zctx, topic: []byte(topic)}
	if err := p.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("open publisher: %w", err), p.Close())
	}
	return p, nil
}

func (p *publisher) open() (err error) {
	if p.socket, err = p.zctx.NewSocket(zmq4.XPUB); err != nil {
		return err
	}
	if err := errors.Join(
		p.socket.SetSndhwm(10_000),
		p.socket.SetXpubNodrop(true),
		p.socket.SetLinger(0),
		p.socket.SetRcvtimeo(startPatience),
		p.socket.SetSndtimeo(startPatience),
		p.socket.Bind("tcp://127.0.0.1:*"),
	); err != nil {
		return err
	}
	p.endpoint, err = p.socket.GetLastEndpoint()
	return err
}

// subscribed waits for a subscriber.
func (p *publisher) subscribed() error {
	if _, err := p.socket.RecvBytes(0); err != nil {
		return fmt.Errorf("wait for subscription: %w", err)
	}
	return nil
}

// send publishes a payload, which is copied.
func (p *publisher) send(payload []byte) error {
	binary.BigEndian.PutUint64(p.seqFrame[:], p.seq)
	p.seq++
	_, err := p.socket.SendBytes(p.topic, zmq4.SNDMORE)
	if err == nil {
		_, err = p.socket.SendBytes(p.seqFrame[:], zmq4.SNDMORE)
	}
	if err == nil {
		_, err = p.socket.SendBytes(payload, 0)
	}
	if err != nil {
		return fmt.Errorf("send batch %d: %w", p.seq-1, err)
	}
	return nil
}

// Close closes the socket. What has not gone out is dropped.
func (p *publisher) Close() error {
	var errs []error
	if p.socket != nil {
		errs = append(errs, p.socket.Close())
	}
	return errors.Join(append(errs, p.zctx.Term())...)
}
