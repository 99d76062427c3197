package simulator

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// sockets are an engine's two sockets. Only one goroutine may call its methods, except wake, which
// is safe for concurrent use.
type sockets struct {
	cfg            SocketConfig
	net            *zmq.Context // of pub and router; nil while they are closed
	pub            *zmq.Socket
	router         *zmq.Socket // nil without replay
	wakeupContext  *zmq.Context
	wakeupReceiver *zmq.Socket
	poller         *zmq.Poller
	wakeup         wakeup
	counters       *counters
	replayBuffer   replayBuffer
	faults         ReplayFaults // of the answers to replay requests
	nextReplayPoll time.Time    // when the router is next polled
	silent         bool         // live messages are not sent

	// The endpoints that the sockets were first bound to, for reopening them.
	endpoint string
	replay   string
}

// openSockets returns sockets that are bound or connecting.
func openSockets(cfg SocketConfig) (*sockets, error) {
	cfg = cfg.withDefaults()
	s := &sockets{
		cfg: cfg, endpoint: cfg.Endpoint, replay: cfg.Replay,
		counters: newCounters(), replayBuffer: replayBuffer{limit: cfg.ReplayLimit},
	}
	if err := s.openWakeup(); err != nil {
		return nil, errors.Join(fmt.Errorf("open wakeup: %w", err), s.close(0))
	}
	if err := s.openPorts(); err != nil {
		return nil, errors.Join(err, s.close(0))
	}
	return s, nil
}

// openPorts opens the two sockets, at their previous ports if they were open before.
func (s *sockets) openPorts() error {
	if s.net != nil {
		return nil
	}
	ctx, err := zmq.NewContext()
	if err != nil {
		return fmt.Errorf("open context: %w", err)
	}
	s.net = ctx
	if err := s.openPub(); err != nil {
		return fmt.Errorf("open publisher at %s: %w", s.endpoint, err)
	}
	if s.cfg.Replay != "" {
		if err := s.openRouter(); err != nil {
			return fmt.Errorf("open replay at %s: %w", s.replay, err)
		}
	}
	s.poll()
	return nil
}

// closePorts closes the two sockets. Their ports are free once it returns, because terminating the
// context waits for that.
func (s *sockets) closePorts(linger time.Duration) error {
	if s.net == nil {
		return nil
	}
	var errs []error
	for _, soc := range []*zmq.Socket{s.pub, s.router} {
		if soc != nil {
			errs = append(errs, soc.SetLinger(linger), soc.Close())
		}
	}
	errs = append(errs, s.net.Term())
	s.net, s.pub, s.router = nil, nil, nil
	s.counters.disconnected()
	s.poll()
	return errors.Join(errs...)
}

// openPub opens the publisher: an XPUB socket, which is a PUB socket on the wire and also receives
// the subscriptions.
func (s *sockets) openPub() (err error) {
	if s.pub, err = s.net.NewSocket(zmq.XPUB); err != nil {
		return err
	}
	if err = errors.Join(
		s.pub.SetSndhwm(s.cfg.HWM),
		// Receive every subscription, not only the first subscription to a topic.
		s.pub.SetXpubVerboser(1),
		s.pub.SetIpv6(strings.Contains(s.cfg.Endpoint, "[")),
	); err != nil {
		return err
	}
	if s.cfg.Mode.binds(s.cfg.Endpoint) {
		err = bind(s.pub, s.endpoint)
	} else {
		err = s.pub.Connect(s.endpoint)
	}
	if err != nil {
		return err
	}
	s.endpoint, err = s.pub.GetLastEndpoint()
	return err
}

func (s *sockets) openRouter() (err error) {
	if s.router, err = s.net.NewSocket(zmq.ROUTER); err != nil {
		return err
	}
	if err = errors.Join(
		s.router.SetSndhwm(s.cfg.ReplayHWM),
		s.router.SetIpv6(strings.Contains(s.cfg.Replay, "[")),
		bind(s.router, s.replay),
	); err != nil {
		return err
	}
	s.replay, err = s.router.GetLastEndpoint()
	return err
}

// bindTimeout bounds the wait for a port in use: the system may have assigned a port that was closed
// a moment ago to another connection.
const bindTimeout = 500 * time.Millisecond

func bind(soc *zmq.Socket, endpoint string) error {
	for until := time.Now().Add(bindTimeout); ; time.Sleep(10 * time.Millisecond) {
		err := soc.Bind(endpoint)
		if zmq.AsErrno(err) != zmq.Errno(syscall.EADDRINUSE) || time.Now().After(until) {
			return err
		}
	}
}

// poll sets the sockets that serve polls.
func (s *sockets) poll() {
	s.poller = zmq.NewPoller()
	s.poller.Add(s.wakeupReceiver, zmq.POLLIN)
	if s.pub != nil {
		s.poller.Add(s.pub, zmq.POLLIN)
	}
	if s.router != nil && s.cfg.ReplayPoll == 0 {
		s.poller.Add(s.router, zmq.POLLIN)
	}
}

// send publishes a message. ZeroMQ drops it for a subscriber at the high-water mark. send drops it
// while the sockets are closed or silent.
func (s *sockets) send(frames ...[]byte) error {
	if s.pub == nil || s.silent {
		return nil
	}
	if _, err := s.pub.SendMessage(frames); err != nil {
		return fmt.Errorf("send message: %w", err)
	}
	return nil
}

// publish sends a batch as three frames: topic, seq and payload.
func (s *sockets) publish(seq uint64, payload []byte) error {
	s.nextReplayPoll = time.Time{}
	return s.send([]byte(s.cfg.Topic), seqFrame(seq), payload)
}

func seqFrame(seq uint64) []byte { return binary.BigEndian.AppendUint64(nil, seq) }

// serve waits for a message or a wakeup, for at most the timeout, rounded down to milliseconds. It then processes all
// subscriptions and answers one replay request, as vLLM's publisher does between two batches.
func (s *sockets) serve(timeout time.Duration) error {
	if s.router != nil && s.cfg.ReplayPoll > 0 {
		if wait := max(0, time.Until(s.nextReplayPoll)); timeout < 0 || wait < timeout {
			timeout = wait
		}
	}
	ready, err := s.poller.Poll(timeout)
	if err != nil {
		if zmq.AsErrno(err) == zmq.Errno(syscall.EINTR) {
			return nil
		}
		return fmt.Errorf("poll sockets: %w", err)
	}
	for _, r := range ready {
		for r.Socket != s.router {
			frames, err := receive(r.Socket)
			if err != nil {
				return err
			}
			if frames == nil {
				break
			}
			s.subscription(r.Socket, frames)
		}
	}
	return s.serveReplay()
}

// receive returns a message, or nil if there is none.
func receive(soc *zmq.Socket) ([][]byte, error) {
	frames, err := soc.RecvMessageBytes(zmq.DONTWAIT)
	switch {
	case err == nil:
		return frames, nil
	case zmq.AsErrno(err) == zmq.Errno(syscall.EAGAIN), zmq.AsErrno(err) == zmq.Errno(syscall.EINTR):
		return nil, nil
	}
	return nil, fmt.Errorf("receive message: %w", err)
}

// subscription counts a message that subscribes or unsubscribes.
func (s *sockets) subscription(from *zmq.Socket, frames [][]byte) {
	if from != s.pub || len(frames) != 1 || len(frames[0]) == 0 {
		return
	}
	switch frames[0][0] {
	case 0:
		s.counters.add(counts{subscriptions: -1})
	case 1:
		s.counters.add(counts{subscriptions: 1})
	}
}

// close closes the sockets permanently. Messages that cannot be sent within the linger time are dropped.
func (s *sockets) close(linger time.Duration) error {
	errs := []error{s.wakeup.close()}
	errs = append(errs, s.closePorts(linger))
	if s.wakeupReceiver != nil {
		errs = append(errs, s.wakeupReceiver.SetLinger(0), s.wakeupReceiver.Close())
	}
	if s.wakeupContext != nil {
		errs = append(errs, s.wakeupContext.Term())
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close sockets: %w", err)
	}
	return nil
}

// wakeup ends another goroutine's poll. It is safe for concurrent use, also after close.
type wakeup struct {
	mu     sync.Mutex
	socket *zmq.Socket // guarded by mu; nil when closed
}

// openWakeup connects the wakeup with the poller.
func (s *sockets) openWakeup() (err error) {
	const endpoint = "inproc://wake" // inproc names are local to the context
	if s.wakeupContext, err = zmq.NewContext(); err != nil {
		return err
	}
	// An inproc socket needs no I/O thread.
	if err = s.wakeupContext.SetIoThreads(0); err != nil {
		return err
	}
	if s.wakeupReceiver, err = s.wakeupContext.NewSocket(zmq.PAIR); err != nil {
		return err
	}
	if err = s.wakeupReceiver.Bind(endpoint); err != nil {
		return err
	}
	if s.wakeup.socket, err = s.wakeupContext.NewSocket(zmq.PAIR); err != nil {
		return err
	}
	return s.wakeup.socket.Connect(endpoint)
}

func (w *wakeup) wake() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.socket != nil {
		// If the queue is full, wakeups are pending already.
		_, _ = w.socket.SendBytes(nil, zmq.DONTWAIT)
	}
}

func (w *wakeup) close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.socket == nil {
		return nil
	}
	soc := w.socket
	w.socket = nil
	if err := soc.SetLinger(0); err != nil {
		return err
	}
	return soc.Close()
}
