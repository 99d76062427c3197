package simulator

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvcast/kvcast/ingest/wire"
)

// Resend sends the buffered batch with a seq once more, as a duplicate.
func (p *Publisher) Resend(seq uint64) error {
	return p.run(func() error {
		for b := range p.feed.memory.since(seq) {
			if b.seq == seq {
				return p.feed.publish(seq, b.payload)
			}
		}
		return fmt.Errorf("resend batch %d: it is not remembered", seq)
	})
}

// SendPayload sends a payload with a seq, both unchecked. The batch is not buffered for replay, and
// the next seq does not change.
func (p *Publisher) SendPayload(seq uint64, payload []byte) error {
	payload = slices.Clone(payload)
	return p.run(func() error { return p.feed.publish(seq, payload) })
}

// SendFrames sends a message of arbitrary frames.
func (p *Publisher) SendFrames(frames ...[]byte) error {
	return p.run(func() error { return p.feed.send(frames...) })
}

// Truncate does what Publish does, but truncates the live message to n bytes of payload. Replay
// returns the whole payload.
func (p *Publisher) Truncate(n int, events ...wire.Event) (seq uint64, err error) {
	err = p.run(func() error {
		b, err := p.feed.add(events, true)
		if err != nil {
			return err
		}
		seq = b.seq
		return p.feed.publish(seq, b.payload[:min(n, len(b.payload))])
	})
	return seq, err
}

// Hold does what Publish does, but delays the live message until Release. Replay returns the batch
// at once.
func (p *Publisher) Hold(events ...wire.Event) (seq uint64, err error) {
	err = p.run(func() error {
		b, err := p.feed.add(events, true)
		if err != nil {
			return err
		}
		seq = b.seq
		p.feed.hold(b)
		return nil
	})
	return seq, err
}

// Release sends the delayed messages with these seqs, in this order; without seqs it sends all of
// them in the order of their seqs. Delayed messages survive a restart and a lost connection.
func (p *Publisher) Release(seqs ...uint64) error {
	seqs = slices.Clone(seqs)
	return p.run(func() error { return p.feed.release(seqs...) })
}

// Silence stops all live messages, or resumes them. Messages in the meantime are lost on the
// network: they are numbered and buffered as if they were sent.
func (p *Publisher) Silence(on bool) error {
	return p.run(func() error { p.feed.silent = on; return nil })
}

// FaultReplay sets the faults of the answers to replay requests from now on.
func (p *Publisher) FaultReplay(f ReplayFaults) error {
	return p.run(func() error { p.feed.faults = f; return nil })
}

// ForgetSeqs removes batches from the replay buffer, so that no replay returns them.
func (p *Publisher) ForgetSeqs(seqs ...uint64) error {
	seqs = slices.Clone(seqs)
	return p.run(func() error { p.feed.memory.punch(seqs); return nil })
}

// ForgetAll empties the replay buffer. The engine continues.
func (p *Publisher) ForgetAll() error {
	return p.run(func() error { p.feed.memory.clear(); return nil })
}

// SetNext sets the seq of the next batch.
func (p *Publisher) SetNext(seq uint64) error {
	return p.run(func() error { p.feed.next = seq; return nil })
}

// Restart restarts the engine without closing its sockets: the replay buffer is empty, the next seq
// is the given one, and faults of replay and live messages end.
func (p *Publisher) Restart(seq uint64) error {
	return p.run(func() error { p.feed.restart(seq); return nil })
}

// RestartProcess does what Restart does, and closes the sockets and reopens them at the same ports.
// Messages that a subscriber has not been sent by then are lost.
func (p *Publisher) RestartProcess(seq uint64) error {
	return p.run(func() error {
		if err := p.feed.shut(0); err != nil {
			return fmt.Errorf("restart process: %w", err)
		}
		p.feed.restart(seq)
		return p.open()
	})
}

// Disconnect closes the sockets. Batches published from then on are buffered for replay, and nobody
// receives them live. Messages that a subscriber has not been sent by then are lost.
func (p *Publisher) Disconnect() error {
	return p.run(func() error {
		if err := p.feed.shut(0); err != nil {
			return fmt.Errorf("disconnect: %w", err)
		}
		return nil
	})
}

// Reconnect reopens the sockets at the same ports. Disconnect and Reconnect simulate a lost
// connection to an engine that keeps running. Publish does not wait for subscribers to reconnect;
// Subscribed does.
func (p *Publisher) Reconnect() error { return p.run(p.open) }

// open opens the sockets. On an error they stay closed.
func (p *Publisher) open() error {
	if err := p.feed.open(); err != nil {
		return errors.Join(fmt.Errorf("reconnect: %w", err), p.feed.shut(0))
	}
	return nil
}
