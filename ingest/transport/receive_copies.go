package transport

import (
	"errors"
	"syscall"

	"github.com/pebbe/zmq4"
)

// receiveCopies does what receiveViews does, but for the connection, with zmq4's methods,
// which allocate and copy. It is used where libzmq's handle is unknown, and to test
// receiveViews.
func (s *Socket) receiveCopies(b *Batch) error {
	before := b.n
	for !b.Full() {
		m, err := s.receiveCopy(b.kept(b.n))
		if err != nil {
			clear(b.kept(b.n)[:])
			if b.n > before || errors.Is(err, zmq4.Errno(syscall.EAGAIN)) {
				return nil
			}
			return err
		}
		b.messages[b.n] = m
		for _, f := range m.Frames {
			b.copied += len(f)
		}
		b.n++
	}
	return nil
}

func (s *Socket) receiveCopy(kept *[keptFrames][]byte) (Message, error) {
	m := Message{FD: noFD, copied: true}
	for more := true; more; {
		frame, err := s.zmq.RecvBytes(zmq4.DONTWAIT)
		if errors.Is(err, zmq4.Errno(syscall.EINTR)) {
			continue
		}
		if err != nil {
			return m, err
		}
		if m.Count < keptFrames {
			kept[m.Count] = frame
		}
		m.Count++
		if more, err = s.zmq.GetRcvmore(); err != nil {
			return m, err
		}
	}
	n := min(m.Count, keptFrames)
	m.Frames = kept[:n:n]
	return m, nil
}
