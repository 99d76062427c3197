package simulator

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"syscall"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// ReplayForm is how a replay socket answers.
type ReplayForm int

// The forms.
const (
	// ReplayTopic puts the topic before the seq: vLLM 0.26 and later,
	// TensorRT-LLM and llm-d-inference-sim.
	ReplayTopic ReplayForm = iota
	// ReplayPlain does not: vLLM before 0.26, and SGLang.
	ReplayPlain
)

// Mode is whether a PUB socket binds or connects.
type Mode int

// The modes.
const (
	// ModeAuto is vLLM's rule: bind where the host is * or ::, or the transport
	// is ipc or inproc, else connect. Beyond it, a port that is 0 or * binds.
	ModeAuto Mode = iota
	// ModeBind binds.
	ModeBind
	// ModeConnect connects.
	ModeConnect
)

// binds tells what a mode comes to at an endpoint.
func (m Mode) binds(endpoint string) bool {
	if m != ModeAuto {
		return m == ModeBind
	}
	return strings.Contains(endpoint, "*") || strings.Contains(endpoint, "::") ||
		strings.HasPrefix(endpoint, "ipc://") || strings.HasPrefix(endpoint, "inproc://") ||
		strings.HasSuffix(endpoint, ":0")
}

// SocketConfig says where and how events are published.
type SocketConfig struct {
	// Endpoint is the PUB socket's; empty means tcp://127.0.0.1:*.
	Endpoint string
	// Mode is whether it binds or connects.
	Mode Mode
	// Topic is the first frame of each message, such as kv@10.0.0.5@model.
	Topic string
	// HWM is the number of messages a subscriber may be behind before its next
	// ones are dropped; 0 means vLLM's 100,000.
	HWM int

	// Replay is the endpoint that the ROUTER socket binds to; empty means none.
	Replay string
	// ReplayForm is how it answers.
	ReplayForm ReplayForm
	// ReplayLimit is the number of batches it remembers; 0 means vLLM's 10,000.
	ReplayLimit int
	// ReplayHWM is the number of replies a reader may be behind before its next
	// ones are dropped without a word; 0 means ZeroMQ's 1,000, as at vLLM.
	ReplayHWM int
}

func (c SocketConfig) withDefaults() SocketConfig {
	if c.Endpoint == "" {
		c.Endpoint = "tcp://127.0.0.1:*"
	}
	if c.HWM == 0 {
		c.HWM = 100_000
	}
	if c.ReplayLimit == 0 {
		c.ReplayLimit = 10_000
	}
	if c.ReplayHWM == 0 {
		c.ReplayHWM = 1_000
	}
	return c
}

// endOfReplay is the seq of the message after the last reply.
const endOfReplay = math.MaxUint64

// sockets are an engine's two sockets, in a ZeroMQ context of their own. All but
// wake is for the one goroutine that has them.
type sockets struct {
	cfg      SocketConfig
	ctx      *zmq.Context
	pub      *zmq.Socket
	router   *zmq.Socket // nil where there is none
	woken    *zmq.Socket
	poller   *zmq.Poller
	waker    waker
	tally    *tally
	memory   memory
	endpoint string
	replay   string
}

// openSockets returns sockets that are bound, or told to connect.
//
// The publisher is an XPUB socket, on the wire the same as the PUB socket of an
// engine: it shows who subscribes.
func openSockets(cfg SocketConfig) (*sockets, error) {
	cfg = cfg.withDefaults()
	ctx, err := zmq.NewContext()
	if err != nil {
		return nil, fmt.Errorf("open context: %w", err)
	}
	s := &sockets{
		cfg: cfg, ctx: ctx, poller: zmq.NewPoller(), tally: newTally(),
		memory: memory{limit: cfg.ReplayLimit},
	}
	if err := s.open(); err != nil {
		return nil, errors.Join(err, s.close(0))
	}
	return s, nil
}

func (s *sockets) open() error {
	if err := s.openWaker(); err != nil {
		return fmt.Errorf("open waker: %w", err)
	}
	if err := s.openPub(); err != nil {
		return fmt.Errorf("open publisher at %s: %w", s.cfg.Endpoint, err)
	}
	if s.cfg.Replay == "" {
		return nil
	}
	if err := s.openRouter(); err != nil {
		return fmt.Errorf("open replay at %s: %w", s.cfg.Replay, err)
	}
	return nil
}

func (s *sockets) openPub() (err error) {
	if s.pub, err = s.ctx.NewSocket(zmq.XPUB); err != nil {
		return err
	}
	if err = errors.Join(
		s.pub.SetSndhwm(s.cfg.HWM),
		// Each subscription is shown, not only the first one to a topic.
		s.pub.SetXpubVerboser(1),
		s.pub.SetIpv6(strings.Contains(s.cfg.Endpoint, "[")),
	); err != nil {
		return err
	}
	if s.cfg.Mode.binds(s.cfg.Endpoint) {
		err = s.pub.Bind(s.cfg.Endpoint)
	} else {
		err = s.pub.Connect(s.cfg.Endpoint)
	}
	if err != nil {
		return err
	}
	s.poller.Add(s.pub, zmq.POLLIN)
	s.endpoint, err = s.pub.GetLastEndpoint()
	return err
}

func (s *sockets) openRouter() (err error) {
	if s.router, err = s.ctx.NewSocket(zmq.ROUTER); err != nil {
		return err
	}
	if err = errors.Join(
		s.router.SetSndhwm(s.cfg.ReplayHWM),
		s.router.SetIpv6(strings.Contains(s.cfg.Replay, "[")),
		s.router.Bind(s.cfg.Replay),
	); err != nil {
		return err
	}
	s.poller.Add(s.router, zmq.POLLIN)
	s.replay, err = s.router.GetLastEndpoint()
	return err
}

// send publishes a message. A subscriber that is too far behind does not get it.
func (s *sockets) send(frames ...[]byte) error {
	if _, err := s.pub.SendMessage(frames); err != nil {
		return fmt.Errorf("send message: %w", err)
	}
	return nil
}

// publish sends a batch in the usual three frames.
func (s *sockets) publish(seq uint64, payload []byte) error {
	return s.send([]byte(s.cfg.Topic), seqFrame(seq), payload)
}

func seqFrame(seq uint64) []byte { return binary.BigEndian.AppendUint64(nil, seq) }

// serve waits for at most the timeout, which is rounded down to milliseconds, and
// then takes what has come: subscriptions, and requests for replay, which it
// answers. It returns early when something comes, or when it is woken.
func (s *sockets) serve(timeout time.Duration) error {
	ready, err := s.poller.Poll(timeout)
	if err != nil {
		if zmq.AsErrno(err) == zmq.Errno(syscall.EINTR) {
			return nil
		}
		return fmt.Errorf("poll sockets: %w", err)
	}
	for _, r := range ready {
		for {
			frames, err := r.Socket.RecvMessageBytes(zmq.DONTWAIT)
			if zmq.AsErrno(err) == zmq.Errno(syscall.EAGAIN) {
				break
			}
			if err != nil {
				return fmt.Errorf("receive message: %w", err)
			}
			if err := s.take(r.Socket, frames); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *sockets) take(from *zmq.Socket, frames [][]byte) error {
	switch {
	case from == s.pub && len(frames) == 1 && len(frames[0]) > 0 && frames[0][0] == 1:
		s.tally.add(1, 0)
	case from == s.pub && len(frames) == 1 && len(frames[0]) > 0 && frames[0][0] == 0:
		s.tally.add(-1, 0)
	case from == s.router && len(frames) == 3 && len(frames[1]) == 0 && len(frames[2]) == 8:
		// Anything else is no request, and gets no answer, as at vLLM.
		err := s.answer(frames[0], binary.BigEndian.Uint64(frames[2]))
		s.tally.add(0, 1)
		return err
	}
	return nil
}

// answer replays what is remembered from a seq on to one reader, and marks the end.
// The socket drops replies that the reader has no room for, as vLLM's does.
func (s *sockets) answer(reader []byte, from uint64) error {
	for b := range s.memory.since(from) {
		if err := s.reply(reader, s.cfg.Topic, b.seq, b.payload); err != nil {
			return err
		}
	}
	return s.reply(reader, "", endOfReplay, nil)
}

func (s *sockets) reply(reader []byte, topic string, seq uint64, payload []byte) error {
	frames := [][]byte{reader, nil, []byte(topic), seqFrame(seq), payload}
	if s.cfg.ReplayForm == ReplayPlain {
		frames = [][]byte{reader, nil, seqFrame(seq), payload}
	}
	if _, err := s.router.SendMessage(frames); err != nil {
		return fmt.Errorf("send reply: %w", err)
	}
	return nil
}

// close closes the sockets. What has been published and not been sent yet goes out
// within the linger time, or not at all.
func (s *sockets) close(linger time.Duration) error {
	errs := []error{s.waker.close()}
	for _, soc := range []*zmq.Socket{s.woken, s.pub, s.router} {
		if soc != nil {
			errs = append(errs, soc.SetLinger(linger), soc.Close())
		}
	}
	errs = append(errs, s.ctx.Term())
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close sockets: %w", err)
	}
	return nil
}
