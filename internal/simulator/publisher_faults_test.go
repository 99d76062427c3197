package simulator_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
)

// replaying returns a publisher with a replay socket, and a connected subscriber.
func replaying(t *testing.T) (*simulator.Publisher, *subscriber) {
	t.Helper()
	p := newPublisher(t, simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{Replay: "tcp://127.0.0.1:*"}})
	sub := subscribe(t, p.Endpoint())
	if err := p.WaitSubscribed(withTimeout(t), 1); err != nil {
		t.Fatal(err)
	}
	return p, sub
}

// received returns the seqs of the next n messages.
func received(t *testing.T, sub *subscriber, n int) (seqs []uint64) {
	t.Helper()
	for range n {
		seqs = append(seqs, receiveBatch(t, sub).seq)
	}
	return seqs
}

func wantSeqs(t *testing.T, what string, want, got []uint64) {
	t.Helper()
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func replayedSeqs(t *testing.T, p *simulator.Publisher) []uint64 {
	t.Helper()
	batches, _, _ := replay(t, p.ReplayEndpoint(), 0)
	return seqsOf(batches)
}

func TestHeldMessagesAreSentOnRelease(t *testing.T) {
	t.Parallel()
	p, sub := replaying(t)
	for h := range uint64(4) {
		must(t)(p.PublishDelayed(removal(h)))
	}
	must(t)(p.Publish(removal(4)))
	if p.SendDelayed(9) == nil || p.SendDelayed(1, 1) == nil {
		t.Error("SendDelayed of a batch that is not delayed: no error")
	}
	wantSeqs(t, "replayed", upTo(0, 4), replayedSeqs(t, p))
	if err := errors.Join(p.SendDelayed(2, 0), p.SendDelayed()); err != nil {
		t.Fatal(err)
	}
	wantSeqs(t, "live", []uint64{4, 2, 0, 1, 3}, received(t, sub, 5))
}

func TestTruncatedMessageIsReplayedWhole(t *testing.T) {
	t.Parallel()
	p, sub := replaying(t)
	must(t)(p.Truncate(7, removal(100)))
	if m := receiveBatch(t, sub); len(m.payload) != 7 {
		t.Errorf("received %d bytes, want 7", len(m.payload))
	}
	batches, _, _ := replay(t, p.ReplayEndpoint(), 0)
	if len(batches) != 1 || hashOf(t, batches[0].payload) != 100 {
		t.Errorf("replayed %+v", batches)
	}
}

func TestSilentPublisherServesReplay(t *testing.T) {
	t.Parallel()
	p, sub := replaying(t)
	must(t)(p.Publish(removal(0)))
	err := p.SetSilent(true)
	must(t)(p.Publish(removal(1)))
	wantSeqs(t, "replayed", upTo(0, 1), replayedSeqs(t, p))
	err = errors.Join(err, p.SetSilent(false))
	must(t)(p.Publish(removal(2)))
	if err != nil {
		t.Fatal(err)
	}
	wantSeqs(t, "live", []uint64{0, 2}, received(t, sub, 2))
}

func TestForgottenBatchesAreNotReplayed(t *testing.T) {
	t.Parallel()
	p, _ := replaying(t)
	for h := range uint64(5) {
		must(t)(p.Publish(removal(h)))
	}
	if err := p.RemoveFromReplay(1, 3, 77); err != nil {
		t.Fatal(err)
	}
	wantSeqs(t, "with holes", []uint64{0, 2, 4}, replayedSeqs(t, p))
	if err := p.ClearReplay(); err != nil {
		t.Fatal(err)
	}
	must(t)(p.Publish(removal(5)))
	wantSeqs(t, "after all is forgotten", []uint64{5}, replayedSeqs(t, p))
}

func TestReplayCanBeFaulty(t *testing.T) {
	t.Parallel()
	p, _ := replaying(t)
	for h := range uint64(4) {
		must(t)(p.Publish(removal(h)))
	}
	d := newDealer(t, p.ReplayEndpoint())
	ask := func(asked int, f simulator.ReplayFaults) {
		t.Helper()
		if err := p.SetReplayFaults(f); err != nil {
			t.Fatal(err)
		}
		for range 2 { // the second request is answered correctly
			d.send(nil, make([]byte, 8))
		}
		if err := p.WaitReplayRequests(withTimeout(t), asked); err != nil {
			t.Fatal(err)
		}
	}
	const end = ^uint64(0)
	read := func(messages int) (seqs []uint64) {
		t.Helper()
		for range messages {
			seq, _, isEnd, err := wire.ParseReply(d.receive())
			if err != nil {
				t.Fatal(err)
			}
			if isEnd {
				seq = end
			}
			seqs = append(seqs, seq)
		}
		return seqs
	}
	well := []uint64{0, 1, 2, 3, end}

	ask(2, simulator.ReplayFaults{NoAnswer: true, Requests: 1})
	wantSeqs(t, "mute", well, read(5))
	ask(4, simulator.ReplayFaults{NoEnd: true, Requests: 1})
	wantSeqs(t, "endless", append([]uint64{0, 1, 2, 3}, well...), read(9))
	ask(6, simulator.ReplayFaults{Skip: func(seq uint64) bool { return seq == 2 }, Requests: 1})
	wantSeqs(t, "with a hole", append([]uint64{0, 1, 3, end}, well...), read(9))
	if p.Replays() != 5 {
		t.Errorf("%d answered, want 5", p.Replays())
	}
}

func TestReconnectUsesTheSamePorts(t *testing.T) {
	t.Parallel()
	for name, restart := range map[string]bool{"flap": false, "restart": true} {
		t.Run(name, func(t *testing.T) {
			p, sub := replaying(t)
			endpoint, at := p.Endpoint(), p.ReplayEndpoint()
			must(t)(p.Publish(removal(0)))
			wantSeqs(t, "before", []uint64{0}, received(t, sub, 1))
			err := p.Disconnect()
			must(t)(p.Publish(removal(1)))
			if p.WaitSubscribed(t.Context(), 0) != nil || p.WaitUnsubscribed(withTimeout(t)) != nil {
				t.Error("subscriptions are counted after the sockets were closed")
			}
			want := []uint64{0, 1, 2}
			if restart {
				err = errors.Join(err, p.RestartProcess(7))
				want = []uint64{7}
			} else {
				err = errors.Join(err, p.Reconnect(), p.Reconnect()) // the second call has no effect
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := p.WaitSubscribed(withTimeout(t), 1); err != nil {
				t.Fatal(err)
			}
			must(t)(p.Publish(removal(2)))
			wantSeqs(t, "after", want[len(want)-1:], received(t, sub, 1))
			wantSeqs(t, "replayed", want, replayedSeqs(t, p))
			if p.Endpoint() != endpoint || p.ReplayEndpoint() != at {
				t.Errorf("got endpoints %s and %s, want %s and %s", p.Endpoint(), p.ReplayEndpoint(), endpoint, at)
			}
		})
	}
}

// TestSlowReplayReaderMissesReplies checks that replies beyond a slow reader's queue are dropped
// silently, as in vLLM.
func TestSlowReplayReaderMissesReplies(t *testing.T) {
	t.Parallel()
	const batches, words = 400, 20_000
	p := newPublisher(t, simulator.PublisherConfig{
		SocketConfig: simulator.SocketConfig{Replay: "tcp://127.0.0.1:*", ReplayHWM: 10},
	})
	big := wire.Event{Kind: wire.KindRemoved, BlockHashes: make([]uint64, words)}
	for i := range big.BlockHashes {
		big.BlockHashes[i] = ^uint64(i)
	}
	for range batches {
		must(t)(p.Drop(big))
	}
	d := newDealer(t, p.ReplayEndpoint())
	d.send(nil, make([]byte, 8))
	if err := p.WaitReplays(withTimeout(t), 1); err != nil { // before the reader receives any reply
		t.Fatal(err)
	}
	// The first reply always arrives. Missing replies have been dropped.
	n := 0
	for timeout := waitTimeout; ; n++ {
		if _, err := d.Receive(timeout); err != nil {
			break
		}
		timeout = time.Second
	}
	if n == 0 || n >= batches {
		t.Errorf("%d replies arrived of %d, want some to be missing", n, batches)
	}
}

// TestIdlePublisherPollsReplay checks that an idle publisher polls its replay socket at intervals,
// as in vLLM.
func TestIdlePublisherPollsReplay(t *testing.T) {
	t.Parallel()
	const poll = 60 * time.Millisecond
	p := newPublisher(t, simulator.PublisherConfig{
		SocketConfig: simulator.SocketConfig{Replay: "tcp://127.0.0.1:*", ReplayPoll: poll},
	})
	start := time.Now()
	for range 3 {
		replay(t, p.ReplayEndpoint(), 0)
	}
	// Each answer takes one poll, so that two intervals pass between the first and the last answer.
	if took := time.Since(start); took < 2*poll-5*time.Millisecond {
		t.Errorf("three answers took %v, want %v or more", took, 2*poll)
	}
	// The publisher also polls after each batch. With an interval of a minute, only this poll can
	// answer the request.
	slow := newPublisher(t, simulator.PublisherConfig{
		SocketConfig: simulator.SocketConfig{Replay: "tcp://127.0.0.1:*", ReplayPoll: time.Minute},
	})
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for ticker := time.NewTicker(time.Millisecond); ; {
			select {
			case <-stop:
				ticker.Stop()
				return
			case <-ticker.C:
				_, _ = slow.Publish(removal(1))
			}
		}
	}()
	replay(t, slow.ReplayEndpoint(), 0)
	close(stop)
	<-stopped
}
