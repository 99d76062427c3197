// Package enginetest implements the publishing side of an engine. The test writes messages byte by
// byte, including ones that no engine sends. The engines of package internal/simulator run on their
// own.
package enginetest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/internal/zmtp/outbound"
	"github.com/kvcast/kvcast/test/harness"
)

// Config configures an Engine. The zero value drops messages to a subscriber that is more than
// 1,000 messages behind.
type Config struct {
	// HighWaterMark is the number of messages that a subscriber may be behind; 0 means ZeroMQ's
	// 1,000, and a negative number no limit.
	HighWaterMark int
}

// maxSubscriptions is how many subscriptions wait for AwaitSubscription. Then further subscribers are
// not read.
const maxSubscriptions = 2000

// Engine is a PUB socket that reports subscriptions. It is not safe for concurrent use.
type Engine struct {
	config        outbound.Config
	sockets       []*outbound.Socket
	subscriptions chan string
	closing       chan struct{} // closed by Close
	seqFrame      [8]byte
}

// New returns an Engine. The caller closes it.
func New(cfg Config) *Engine {
	e := &Engine{subscriptions: make(chan string, maxSubscriptions), closing: make(chan struct{})}
	e.config = outbound.Config{Type: zmtp.PUB, HighWater: cfg.HighWaterMark, OnEvent: e.event}
	switch {
	case cfg.HighWaterMark == 0:
		e.config.HighWater = 1000
	case cfg.HighWaterMark < 0:
		e.config.HighWater = math.MaxInt
	}
	return e
}

// event keeps a subscription for AwaitSubscription.
func (e *Engine) event(event outbound.Event) {
	if event.Kind != zmtp.Subscribe {
		return
	}
	select {
	case e.subscriptions <- event.Topic:
	case <-e.closing:
	}
}

// Bind binds to an endpoint such as tcp://127.0.0.1:*, and returns it with its actual port.
func (e *Engine) Bind(endpoint string) (string, error) {
	at, ok := config.ParseEndpoint(endpoint, true)
	if !ok {
		return "", fmt.Errorf("bind engine to %s: want %s", endpoint, config.AllowedBind)
	}
	network, address := at.Net()
	s, err := harness.Bind(func() (*outbound.Socket, error) { return outbound.Bind(network, address, e.config) })
	if err != nil {
		return "", fmt.Errorf("bind engine: %w", err)
	}
	e.sockets = append(e.sockets, s)
	if at.Transport == config.TransportIPC {
		return endpoint, nil
	}
	return "tcp://" + s.Addr().String(), nil
}

// Connect keeps connecting to an endpoint.
func (e *Engine) Connect(endpoint string) error {
	at, ok := config.ParseEndpoint(endpoint, false)
	if !ok {
		return fmt.Errorf("connect engine to %s: want %s", endpoint, config.AllowedConnect)
	}
	network, address := at.Net()
	e.sockets = append(e.sockets, outbound.Connect(network, address, e.config))
	return nil
}

// AwaitSubscription waits for a subscriber, which receives everything sent from then on, and
// returns the topic prefix of its subscription. It returns each subscription once.
func (e *Engine) AwaitSubscription() (topic string, err error) {
	select {
	case topic := <-e.subscriptions:
		return topic, nil
	case <-time.After(harness.Timeout):
		return "", errors.New("await subscription: timeout")
	}
}

// Send sends a message of one or more frames, which are copied.
func (e *Engine) Send(frames ...[]byte) {
	for _, s := range e.sockets {
		s.Publish(frames...)
	}
}

// Publish sends a batch: a message of topic, seq and payload.
func (e *Engine) Publish(topic []byte, seq uint64, payload []byte) {
	binary.BigEndian.PutUint64(e.seqFrame[:], seq)
	e.Send(topic, e.seqFrame[:], payload)
}

// Close closes the sockets, and drops messages that have not been sent. Further calls have no
// effect.
func (e *Engine) Close() {
	select {
	case <-e.closing:
		return
	default:
	}
	close(e.closing)
	for _, s := range e.sockets {
		s.Close(0)
	}
}
