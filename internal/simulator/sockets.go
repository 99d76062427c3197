package simulator

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/internal/zmtp/outbound"
)

// maxRequests is how many replay requests wait to be answered. Then their readers are not read.
const maxRequests = 100

// sockets are an engine's two sockets. Only one goroutine may call its methods, except wake, which
// is safe for concurrent use.
type sockets struct {
	cfg          SocketConfig
	pub          *outbound.Socket // nil while the sockets are closed
	router       *outbound.Socket // nil then, and without replay
	snapshots    *outbound.Socket // nil then, and without snapshots
	closing      chan struct{}    // closed when pub and router are closed
	requests     chan outbound.Event
	snapshotAsks chan outbound.Event
	// answerSnapshot returns the messages that answer a request for a snapshot, without the delimiter.
	answerSnapshot func() [][][]byte
	epoch          string        // in live topics; empty for none
	wakeups        chan struct{} // ends serve
	counters       *counters
	replayBuffer   replayBuffer
	faults         ReplayFaults // of the answers to replay requests
	nextReplayPoll time.Time    // when the router is next polled
	silent         bool         // nothing is sent live

	// The endpoints that the sockets were first bound to, for reopening them.
	endpoint string
	replay   string
	snapshot string
}

// openSockets returns sockets that are bound or connecting.
func openSockets(cfg SocketConfig) (*sockets, error) {
	cfg = cfg.withDefaults()
	s := &sockets{
		cfg: cfg, endpoint: cfg.Endpoint, replay: cfg.Replay, snapshot: cfg.Snapshot, wakeups: make(chan struct{}, 1),
		counters: newCounters(), replayBuffer: replayBuffer{limit: cfg.ReplayLimit},
	}
	if err := s.openPorts(); err != nil {
		s.closePorts(0)
		return nil, err
	}
	return s, nil
}

// openPorts opens the two sockets, at their previous ports if they were open before.
func (s *sockets) openPorts() (err error) {
	if s.pub != nil {
		return nil
	}
	s.closing, s.requests = make(chan struct{}), make(chan outbound.Event, maxRequests)
	s.snapshotAsks = make(chan outbound.Event, maxRequests)
	pub := outbound.Config{Type: zmtp.PUB, HighWater: s.cfg.HWM, OnEvent: s.subscription}
	if s.cfg.Mode.binds(s.cfg.Endpoint) {
		s.pub, s.endpoint, err = bind(s.endpoint, pub)
	} else {
		s.pub, err = connect(s.endpoint, pub)
	}
	if err != nil {
		return fmt.Errorf("open publisher at %s: %w", s.endpoint, err)
	}
	router := func(requests chan<- outbound.Event) outbound.Config {
		closing := s.closing
		return outbound.Config{Type: zmtp.ROUTER, HighWater: s.cfg.ReplayHWM, OnEvent: func(e outbound.Event) {
			select {
			case requests <- e:
			case <-closing:
			}
		}}
	}
	if s.cfg.Replay != "" {
		if s.router, s.replay, err = bind(s.replay, router(s.requests)); err != nil {
			return fmt.Errorf("open replay at %s: %w", s.replay, err)
		}
	}
	if s.cfg.Snapshot != "" {
		if s.snapshots, s.snapshot, err = bind(s.snapshot, router(s.snapshotAsks)); err != nil {
			return fmt.Errorf("open snapshots at %s: %w", s.snapshot, err)
		}
	}
	return nil
}

// closePorts closes the two sockets. Their ports are free once it returns. Messages that have been
// published and not sent are sent within the linger time, or dropped.
func (s *sockets) closePorts(linger time.Duration) {
	if s.pub == nil {
		return
	}
	s.pub.Close(linger)
	close(s.closing)
	if s.router != nil {
		s.router.Close(linger)
	}
	if s.snapshots != nil {
		s.snapshots.Close(linger)
	}
	s.pub, s.router, s.snapshots = nil, nil, nil
	s.counters.disconnected()
}

// parseEndpoint returns the network and address of an endpoint for package net. Like libzmq, it
// takes * for all addresses of IPv4.
func parseEndpoint(endpoint string) (network, address string, err error) {
	e, ok := config.ParseEndpoint(endpoint, true)
	if !ok {
		return "", "", fmt.Errorf("endpoint %q is invalid: want %s", endpoint, config.AllowedBind)
	}
	if network, address = e.Net(); e.Address == "*" {
		network = "tcp4"
	}
	return network, address, nil
}

func connect(endpoint string, c outbound.Config) (*outbound.Socket, error) {
	network, address, err := parseEndpoint(endpoint)
	if err != nil {
		return nil, err
	}
	return outbound.Connect(network, address, c), nil
}

// bindTimeout bounds the wait for a port in use: the system may have assigned a port that was closed
// a moment ago to another connection.
const bindTimeout = 500 * time.Millisecond

// bind returns a bound socket, and its endpoint with the actual port.
func bind(endpoint string, c outbound.Config) (*outbound.Socket, string, error) {
	network, address, err := parseEndpoint(endpoint)
	if err != nil {
		return nil, endpoint, err
	}
	if network == "unix" {
		if err := config.RemoveSocket(address); err != nil {
			return nil, endpoint, err
		}
	}
	for until := time.Now().Add(bindTimeout); ; time.Sleep(10 * time.Millisecond) {
		s, err := outbound.Bind(network, address, c)
		switch {
		case err == nil && network == "unix":
			return s, endpoint, nil
		case err == nil:
			return s, "tcp://" + s.Addr().String(), nil
		case !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(until):
			return nil, endpoint, err
		}
	}
}

// send publishes a message. A subscriber that is too far behind does not receive it, and no
// subscriber does while the sockets are closed or silent.
func (s *sockets) send(frames ...[]byte) {
	if s.pub != nil && !s.silent {
		s.pub.Publish(frames...)
	}
}

// publish sends a batch in the usual three frames.
func (s *sockets) publish(seq uint64, payload []byte) {
	s.publishAs(s.liveTopic(), seq, payload)
}

// publishAs sends a batch with another topic.
func (s *sockets) publishAs(topic string, seq uint64, payload []byte) {
	s.nextReplayPoll = time.Time{}
	s.send([]byte(topic), outbound.SeqFrame(seq), payload)
}

// liveTopic returns the topic of live batches.
func (s *sockets) liveTopic() string {
	if s.epoch == "" {
		return s.cfg.Topic
	}
	return wire.TopicWithEpoch(s.cfg.Topic, s.epoch)
}

// serve waits for at most the timeout, which is unlimited if negative, and answers one replay
// request, if there is one, as vLLM's publisher does between two batches. It returns early when
// there is a request, when subscriptions change, and when it is woken.
func (s *sockets) serve(timeout time.Duration) {
	polls := s.router != nil && s.cfg.ReplayPoll > 0
	if polls {
		if wait := max(0, time.Until(s.nextReplayPoll)); timeout < 0 || wait < timeout {
			timeout = wait
		}
	}
	requests := s.requests
	if polls || s.router == nil {
		requests = nil
	}
	var due <-chan time.Time
	if timeout >= 0 {
		due = time.After(timeout)
	}
	select {
	case e := <-requests:
		s.serveReplay(e)
		return
	case e := <-s.snapshotAsks:
		s.serveSnapshot(e)
		return
	case <-s.wakeups:
	case <-due:
	}
	if polls && !time.Now().Before(s.nextReplayPoll) {
		s.nextReplayPoll = time.Now().Add(s.cfg.ReplayPoll)
		requests = s.requests
	}
	select {
	case e := <-requests:
		s.serveReplay(e)
	default:
	}
}

// subscription counts a subscription or its end.
func (s *sockets) subscription(e outbound.Event) {
	switch e.Kind {
	case zmtp.Subscribe:
		s.counters.add(counts{subscriptions: 1})
	case zmtp.Cancel:
		s.counters.add(counts{subscriptions: -1})
	default:
		return
	}
	s.wake()
}

// wake ends serve, or its next call.
func (s *sockets) wake() {
	select {
	case s.wakeups <- struct{}{}:
	default:
	}
}
