//go:build cgo

package bench_test

import (
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/native"
	"github.com/kvcast/kvcast/test/bench"
)

func init() {
	roles["native"] = newNativeReceive
}

// BenchmarkReceiveNative is BenchmarkReceiveBatch/wait with package native.
func BenchmarkReceiveNative(b *testing.B) {
	for _, s := range storeShapes {
		benchmarkReceive(b, s.name, "native", s.shape)
	}
}

// nativeReceive is a child's Go loop that uses package native.
type nativeReceive struct {
	receiver transport.Receiver
	seq      uint64 // of the next message
}

func newNativeReceive(s childSetup) (work, error) {
	r, err := native.New(native.Config{}).Subscribe(s.Address, "", nil)
	return &nativeReceive{receiver: r}, err
}

func (r *nativeReceive) do(n int) (sum uint64, err error) {
	until := time.Now().Add(bench.IdleLimit)
	for got := 0; got < n; {
		c, err := r.receiver.Next(func() time.Time { return until })
		if err != nil {
			return 0, fmt.Errorf("receive message %d: %w", r.seq, err)
		}
		for _, m := range c.Messages {
			if m.Count != 3 || len(m.Frames[1]) != 8 || binary.BigEndian.Uint64(m.Frames[1]) != r.seq {
				return 0, fmt.Errorf("receive message %d: got %x", r.seq, m.Frames)
			}
			for _, f := range m.Frames {
				sum += uint64(len(f))
			}
			r.seq++
		}
		got += len(c.Messages)
		r.receiver.Recycle(c)
	}
	return sum, nil
}

// Close closes the socket.
func (r *nativeReceive) Close() error { return r.receiver.Close() }
