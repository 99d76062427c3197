package native_test

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/native"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/test/harness"
)

// TestLargeMessagesAreBounded checks that large messages that are not processed use no more than their
// memory, and that no peer is disconnected or loses a message, however far the reader is behind.
func TestLargeMessagesAreBounded(t *testing.T) {
	t.Parallel()
	const peers, messages, limit = 10, 3, 18 << 20 // of which 2 MiB are for one large message
	reasons, onReject := rejections()
	tr := native.New(native.Config{
		OnReject: onReject, LargeBytes: limit, Limits: zmtp.Limits{Bytes: 2 << 20}, Grace: func() time.Duration { return harness.Timeout },
	})
	r, address := bindTo(t, tr)
	message := zmtp.AppendMessage(nil, []byte("topic"), make([]byte, 8), make([]byte, 1_500_000))
	var all []*rawPeer
	for range peers {
		p := dial(t, address)
		p.write(handshake())
		r.want(transport.Connected)
		all = append(all, p)
	}
	var sent sync.WaitGroup
	defer func() {
		for _, p := range all {
			_ = p.Close()
		}
		sent.Wait()
	}()
	for _, p := range all {
		sent.Go(func() {
			for range messages {
				if _, err := p.Write(message); err != nil {
					t.Error(err)
				}
			}
		})
	}
	harness.WaitFor(t, func() bool { return tr.LargeBytes() == 16<<20 })
	for range peers * messages {
		if n := tr.LargeBytes(); n > limit {
			t.Fatalf("large messages use %d bytes of %d", n, limit)
		}
		if f := r.message(); len(f) != 3 || len(f[2]) != 1_500_000 {
			t.Fatalf("got %d frames", len(f))
		}
	}
	if n := tr.LargeBytes(); n != 0 {
		t.Errorf("%d bytes after the last message", n)
	}
	select {
	case reason := <-reasons:
		t.Errorf("a peer is rejected: %v", reason)
	default:
	}
}

// TestStalledMessagesMakeRoom has peers that do not complete large messages, whose memory they fill, and checks that others are received all the
// same: of another address, and of the same.
func TestStalledMessagesMakeRoom(t *testing.T) {
	t.Parallel()
	for name, local := range map[string]net.IP{"of another address": net.IPv4(127, 0, 0, 2), "of the same address": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const limit = 18 << 20 // beside what is reserved for the largest message: 2 MiB
			reasons, onReject := rejections()
			tr := native.New(native.Config{OnReject: onReject, LargeBytes: limit})
			r, address := bindTo(t, tr)
			part := append(handshake(), 2, 0, 0, 0, 0, 0, 0x40, 0, 0) // of 4 MiB
			part = append(part, make([]byte, 40_000)...)
			for range 20 {
				dial(t, address).write(part)
			}
			harness.WaitFor(t, func() bool { return tr.LargeBytes() >= 2<<20 })
			honest := dialFrom(t, local, address)
			honest.write(handshake())
			go func() { _, _ = honest.Write(zmtp.AppendMessage(nil, []byte("kv@"), make([]byte, 2<<20))) }()
			for len(r.take().Events) > 0 {
				r.event()
			}
			if f := r.message(); len(f) != 2 {
				t.Errorf("got %d frames", len(f))
			}
			wantReason(t, reasons, "memory")
		})
	}
}

// TestIncompleteMessagesAreBounded has peers that do not complete messages which are not large, and checks that their memory is bounded.
func TestIncompleteMessagesAreBounded(t *testing.T) {
	t.Parallel()
	const limit = 1 << 20
	reasons, onReject := rejections()
	tr := native.New(native.Config{OnReject: onReject, LargeBytes: limit, Limits: zmtp.Limits{Bytes: 64 << 10}})
	r, address := bindTo(t, tr)
	part := append(handshake(), 2, 0, 0, 0, 0, 0, 0, 0x70, 0) // of 28 KiB
	part = append(part, make([]byte, 20<<10)...)
	const peers = 60
	for range peers {
		dial(t, address).write(part)
	}
	for range 10 {
		wantReason(t, reasons, "memory")
	}
	if n := tr.LargeBytes(); n > limit {
		t.Errorf("%d bytes of %d", n, limit)
	}
	honest := dial(t, address)
	honest.write(append(handshake(), zmtp.AppendMessage(nil, []byte("kv@"))...))
	for len(r.take().Events) > 0 {
		r.event()
	}
	if f := r.message(); string(f[0]) != "kv@" {
		t.Errorf("got %q", f)
	}
}

// TestPeerThatAnswersInTimeIsNotDisconnected checks that time in which kvcast has no read buffer for a
// connection is not counted against the peer, and that no buffer is lost.
func TestPeerThatAnswersInTimeIsNotDisconnected(t *testing.T) {
	t.Parallel()
	const heartbeat = time.Second
	r, address := bind(t, native.Config{ReadBytes: 64 << 10, Limits: zmtp.Limits{Heartbeat: heartbeat}})
	var peers [2]*rawPeer
	for i := range peers {
		p := dial(t, address)
		p.write(handshake())
		r.want(transport.Connected)
		go p.answer()
		peers[i] = p
	}
	peers[0].write(zmtp.AppendMessage(nil, []byte("first")))
	first := r.take() // has the only read buffer
	r.chunk = nil
	until := time.Now().Add(3 * heartbeat)
	if c, err := r.Next(func() time.Time { return until }); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("got %+v and %v while there is no buffer", c, err)
	}
	r.Recycle(first)
	for _, p := range peers {
		p.write(zmtp.AppendMessage(nil, []byte("next")))
		if m := r.message(); string(m[0]) != "next" {
			t.Fatalf("got %q", m)
		}
	}
}

// TestReconnectBesideBacklog checks that a peer can connect whose former connection has a backlog that
// is not processed.
func TestReconnectBesideBacklog(t *testing.T) {
	t.Parallel()
	r, address := bind(t, native.Config{})
	busy := dial(t, address)
	busy.write(handshake())
	r.want(transport.Connected)
	go func() {
		message := zmtp.AppendMessage(nil, make([]byte, 30_000))
		for {
			if _, err := busy.Write(message); err != nil {
				return
			}
		}
	}()
	first := r.take() // and no more is processed
	r.chunk = nil
	next := dial(t, address)
	next.write(handshake())
	if _, err := io.ReadFull(next, make([]byte, zmtp.GreetingBytes)); err != nil {
		t.Fatal(err)
	}
	r.Recycle(first)
	_ = busy.Close()
}
