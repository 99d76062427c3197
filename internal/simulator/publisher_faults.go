package simulator

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvcast/kvcast/ingest/wire"
)

// Resend sends what is remembered of a seq once more, as a duplicate.
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

// SendPayload sends a payload under a seq, whatever they are. Neither is remembered,
// and the next seq stays as it was.
func (p *Publisher) SendPayload(seq uint64, payload []byte) error {
	payload = slices.Clone(payload)
	return p.run(func() error { return p.feed.publish(seq, payload) })
}

// SendFrames sends a message of these frames, whatever they are.
func (p *Publisher) SendFrames(frames ...[]byte) error {
	return p.run(func() error { return p.feed.send(frames...) })
}

// Truncate does all that Publish does, but the message that goes out ends after n
// bytes of the payload. Replay gives it whole.
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

// Hold does all that Publish does but send: the message is held back until it is
// released. Replay gives it at once.
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

// Release sends the messages with these seqs, which are held back, in this order; or
// without seqs all that are held back, in the order of their seqs. Neither a
// restart nor a lost connection takes what is held back.
func (p *Publisher) Release(seqs ...uint64) error {
	seqs = slices.Clone(seqs)
	return p.run(func() error { return p.feed.release(seqs...) })
}

// Silence stops all live messages, or lets them go out again. Those of the meantime
// are lost to the network: they are numbered and remembered as if sent.
func (p *Publisher) Silence(on bool) error {
	return p.run(func() error { p.feed.silent = on; return nil })
}

// FaultReplay sets what is wrong with answers to requests for replay from now on.
func (p *Publisher) FaultReplay(f ReplayFaults) error {
	return p.run(func() error { p.feed.faults = f; return nil })
}

// ForgetSeqs makes holes in what is remembered: no replay gives these batches again.
func (p *Publisher) ForgetSeqs(seqs ...uint64) error {
	seqs = slices.Clone(seqs)
	return p.run(func() error { p.feed.memory.punch(seqs); return nil })
}

// ForgetAll empties what is remembered. The engine goes on.
func (p *Publisher) ForgetAll() error {
	return p.run(func() error { p.feed.memory.clear(); return nil })
}

// SetNext sets the seq of the next batch.
func (p *Publisher) SetNext(seq uint64) error {
	return p.run(func() error { p.feed.next = seq; return nil })
}

// Restart makes the engine begin anew behind the same sockets: nothing is
// remembered, the next seq is this one, and replay and live messages are well.
func (p *Publisher) Restart(seq uint64) error {
	return p.run(func() error { p.feed.restart(seq); return nil })
}

// RestartProcess does all that Restart does, and closes the sockets and opens them
// again at the same ports. What a subscriber has not been sent by then is lost.
func (p *Publisher) RestartProcess(seq uint64) error {
	return p.run(func() error {
		if err := p.feed.shut(0); err != nil {
			return fmt.Errorf("restart process: %w", err)
		}
		p.feed.restart(seq)
		return p.open()
	})
}

// Disconnect closes the sockets. What is published from then on is remembered, and
// nobody receives it. What a subscriber has not been sent by then is lost.
func (p *Publisher) Disconnect() error {
	return p.run(func() error {
		if err := p.feed.shut(0); err != nil {
			return fmt.Errorf("disconnect: %w", err)
		}
		return nil
	})
}

// Reconnect opens the sockets again at the same ports. Disconnect and Reconnect are
// a connection that is lost and comes back, of an engine that went on. Publish
// does not wait for subscribers to come back; Subscribed does.
func (p *Publisher) Reconnect() error { return p.run(p.open) }

// open opens the sockets. Where it can't it leaves them closed.
func (p *Publisher) open() error {
	if err := p.feed.open(); err != nil {
		return errors.Join(fmt.Errorf("reconnect: %w", err), p.feed.shut(0))
	}
	return nil
}
