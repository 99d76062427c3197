package simulator

import (
	"fmt"
	"slices"

	"github.com/kvcast/kvcast/internal/wire"
)

// Resend sends the buffered batch with a seq once more, as a duplicate.
func (p *Publisher) Resend(seq uint64) error {
	return p.run(func() error {
		for b := range p.feed.replayBuffer.since(seq) {
			if b.seq == seq {
				p.feed.publish(seq, b.payload)
				return nil
			}
		}
		return fmt.Errorf("resend batch %d: it is not buffered", seq)
	})
}

// SendPayload sends a payload with a seq, both unchecked. The batch is not buffered for replay, and
// the next seq does not change.
func (p *Publisher) SendPayload(seq uint64, payload []byte) error {
	payload = slices.Clone(payload)
	return p.run(func() error { p.feed.publish(seq, payload); return nil })
}

// SendFrames sends a message of arbitrary frames.
func (p *Publisher) SendFrames(frames ...[]byte) error {
	return p.run(func() error { p.feed.send(frames...); return nil })
}

// Truncate does what Publish does, but truncates the live message to n bytes of payload. Replay
// returns the whole payload.
func (p *Publisher) Truncate(n int, events ...wire.Event) (seq uint64, err error) {
	err = p.run(func() error {
		b := p.feed.add(events, true)
		seq = b.seq
		p.feed.publish(seq, b.payload[:min(n, len(b.payload))])
		return nil
	})
	return seq, err
}

// PublishDelayed does what Publish does, but sends the live message only on SendDelayed. Replay returns the batch at
// once.
func (p *Publisher) PublishDelayed(events ...wire.Event) (seq uint64, err error) {
	err = p.run(func() error {
		b := p.feed.add(events, true)
		seq = b.seq
		p.feed.delay(b)
		return nil
	})
	return seq, err
}

// SendDelayed sends the delayed messages with the given seqs, in the given order; without seqs, all delayed messages in
// the order in which they were delayed. Delayed messages survive Restart and Disconnect.
func (p *Publisher) SendDelayed(seqs ...uint64) error {
	seqs = slices.Clone(seqs)
	return p.run(func() error { return p.feed.sendDelayed(seqs...) })
}

// SetSilent stops or resumes live messages. Batches that are published in the meantime get a seq and are buffered.
func (p *Publisher) SetSilent(on bool) error {
	return p.run(func() error { p.feed.silent = on; return nil })
}

// SetReplayFaults sets the faults of the answers to replay requests from now on.
func (p *Publisher) SetReplayFaults(f ReplayFaults) error {
	return p.run(func() error { p.feed.faults = f; return nil })
}

// SetSnapshotFaults sets the faults of the answers to requests for snapshots from now on. The publisher has snapshots.
func (p *Publisher) SetSnapshotFaults(f SnapshotFaults) error {
	return p.run(func() error { p.feed.snapshot.faults = f; return nil })
}

// RemoveFromReplay removes batches from the replay buffer, so that no replay returns them.
func (p *Publisher) RemoveFromReplay(seqs ...uint64) error {
	seqs = slices.Clone(seqs)
	return p.run(func() error { p.feed.replayBuffer.remove(seqs); return nil })
}

// ClearReplay empties the replay buffer. The engine continues.
func (p *Publisher) ClearReplay() error {
	return p.run(func() error { p.feed.replayBuffer.clear(); return nil })
}

// SetNextSeq sets the seq of the next batch.
func (p *Publisher) SetNextSeq(seq uint64) error {
	return p.run(func() error { p.feed.next = seq; return nil })
}

// Restart restarts the engine without closing its sockets: the replay buffer is empty, the next seq
// is the given seq, and SetSilent and SetReplayFaults are reset.
func (p *Publisher) Restart(seq uint64) error {
	return p.run(func() error { p.feed.restart(seq); return nil })
}

// RestartProcess does what Restart does, and closes the sockets and reopens them at the same ports.
// Messages in the send queue are lost.
func (p *Publisher) RestartProcess(seq uint64) error {
	return p.run(func() error {
		p.feed.closePorts(0)
		p.feed.restart(seq)
		return p.open()
	})
}

// Disconnect closes the sockets. Batches published from then on are buffered for replay, and nobody
// receives them live. Messages in the send queue are lost.
func (p *Publisher) Disconnect() error {
	return p.run(func() error { p.feed.closePorts(0); return nil })
}

// Reconnect reopens the sockets at the same ports. Disconnect and Reconnect simulate a lost connection to an engine that
// keeps running. Use WaitSubscribed to wait for subscribers to reconnect.
func (p *Publisher) Reconnect() error { return p.run(p.open) }

// open opens the sockets. On an error they stay closed.
func (p *Publisher) open() error {
	if err := p.feed.openPorts(); err != nil {
		p.feed.closePorts(0)
		return fmt.Errorf("reconnect: %w", err)
	}
	return nil
}
