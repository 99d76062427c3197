// Package enginetest implements the publishing side of an engine. The test writes messages byte by
// byte, including ones that no engine sends. The engines of package internal/simulator run on their
// own.
package enginetest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/test/harness"
)

// Config configures an Engine. The zero value drops messages to a subscriber that is more than
// 1,000 messages behind.
type Config struct {
	// HighWaterMark is the number of messages that a subscriber may be behind; 0 means ZeroMQ's
	// 1,000, and a negative number no limit.
	HighWaterMark int
	// Blocking makes sending wait for a subscriber at the high-water mark instead of
	// dropping messages.
	Blocking bool
	// Verbose delivers every subscription, not only the first one to each topic.
	Verbose bool
}

// Engine is an XPUB socket, which is a PUB socket on the wire and also receives subscriptions. It
// is not safe for concurrent use.
type Engine struct {
	context  *zmq4.Context
	socket   *zmq4.Socket
	seqFrame [8]byte
}

// New returns an Engine. The caller closes it.
func New(cfg Config) (*Engine, error) {
	zctx, err := zmq4.NewContext()
	if err != nil {
		return nil, fmt.Errorf("open engine: %w", err)
	}
	e := &Engine{context: zctx}
	if err := e.open(cfg); err != nil {
		return nil, errors.Join(fmt.Errorf("open engine: %w", err), e.Close())
	}
	return e, nil
}

func (e *Engine) open(cfg Config) (err error) {
	if e.socket, err = e.context.NewSocket(zmq4.XPUB); err != nil {
		return err
	}
	if cfg.HighWaterMark != 0 {
		err = e.socket.SetSndhwm(max(0, cfg.HighWaterMark)) // 0 means no limit in ZeroMQ
	}
	if cfg.Verbose {
		err = errors.Join(err, e.socket.SetXpubVerbose(1))
	}
	return errors.Join(err,
		e.socket.SetXpubNodrop(cfg.Blocking),
		e.socket.SetLinger(0),
		e.socket.SetRcvtimeo(harness.Timeout),
		e.socket.SetSndtimeo(harness.Timeout),
		e.socket.SetIpv6(true),
	)
}

// Bind binds to an endpoint such as tcp://127.0.0.1:*, and returns it with its actual port.
func (e *Engine) Bind(endpoint string) (string, error) {
	if err := e.socket.Bind(endpoint); err != nil {
		return "", fmt.Errorf("bind engine to %s: %w", endpoint, err)
	}
	return e.socket.GetLastEndpoint()
}

// Connect connects to an endpoint.
func (e *Engine) Connect(endpoint string) error {
	if err := e.socket.Connect(endpoint); err != nil {
		return fmt.Errorf("connect engine to %s: %w", endpoint, err)
	}
	return nil
}

// AwaitSubscription waits for a subscriber, which receives everything sent from then on, and
// returns the topic prefix of its subscription.
func (e *Engine) AwaitSubscription() (topic string, err error) {
	for {
		message, err := e.socket.Recv(0)
		if err != nil {
			return "", fmt.Errorf("await subscription: %w", err)
		}
		if topic, ok := strings.CutPrefix(message, "\x01"); ok {
			return topic, nil
		}
		// Ignore the end of an earlier subscription.
	}
}

// Send sends a message of frames, which are copied.
func (e *Engine) Send(frames ...[]byte) error {
	for i, f := range frames {
		flags := zmq4.SNDMORE
		if i == len(frames)-1 {
			flags = 0
		}
		if _, err := e.socket.SendBytes(f, flags); err != nil {
			return fmt.Errorf("send frame %d: %w", i, err)
		}
	}
	return nil
}

// Publish sends a batch: a message of topic, seq and payload.
func (e *Engine) Publish(topic []byte, seq uint64, payload []byte) error {
	binary.BigEndian.PutUint64(e.seqFrame[:], seq)
	if err := e.Send(topic, e.seqFrame[:], payload); err != nil {
		return fmt.Errorf("publish batch %d: %w", seq, err)
	}
	return nil
}

// Close closes the socket, and drops messages that have not been sent. Further calls have no
// effect.
func (e *Engine) Close() error {
	var errs []error
	if e.socket != nil {
		errs = append(errs, e.socket.Close())
		e.socket = nil
	}
	if e.context != nil {
		errs = append(errs, e.context.Term())
		e.context = nil
	}
	return errors.Join(errs...)
}
