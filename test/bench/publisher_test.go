package bench_test

import (
	"errors"

	"github.com/kvcast/kvcast/test/harness/enginetest"
)

// topic has the form that llm-d uses. Its length adds to every message.
const topic = "kv@10.0.0.5@" + modelName

// publisher publishes pre-encoded payloads. It waits for a slow subscriber instead of dropping
// messages.
type publisher struct {
	*enginetest.Engine
	endpoint string
	topic    []byte
	seq      uint64 // of the next message
}

// newPublisher returns a publisher bound to a free port.
func newPublisher() (*publisher, error) {
	e, err := enginetest.New(enginetest.Config{HighWaterMark: 10_000, Blocking: true})
	if err != nil {
		return nil, err
	}
	endpoint, err := e.Bind("tcp://127.0.0.1:*")
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return &publisher{Engine: e, endpoint: endpoint, topic: []byte(topic)}, nil
}

// subscribed waits for a subscriber.
func (p *publisher) subscribed() error {
	_, err := p.AwaitSubscription()
	return err
}

// send publishes a payload, which is copied.
func (p *publisher) send(payload []byte) error {
	p.seq++
	return p.Publish(p.topic, p.seq-1, payload)
}
