//go:build cgo

package bench_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/internal/transport/libzmq"
	"github.com/kvcast/kvcast/test/bench"
)

func init() {
	roles["batch"] = func(s childSetup) (work, error) { return newBatchReceive(s, (*batchReceive).pause) }
	roles["wait"] = func(s childSetup) (work, error) { return newBatchReceive(s, (*batchReceive).wait) }
}

// BenchmarkReceiveBatch is BenchmarkFloorReceive with the receive loop of ingest: batch uses
// package transport, which receives many messages per C call without copying, and sleeps on an
// empty socket as the floor does. wait does not sleep, but wakes for each message, as ingest does;
// its cost depends on the number of messages that arrive at a time.
func BenchmarkReceiveBatch(b *testing.B) {
	for _, role := range []string{"batch", "wait"} {
		for _, s := range storeShapes {
			benchmarkReceive(b, role+"/"+s.name, role, s.shape)
		}
	}
}

// batchMessages is the maximum number of messages received at a time.
const batchMessages = 64

// batchReceive is a child's Go loop that uses package transport.
type batchReceive struct {
	zctx   *zmq4.Context
	socket *libzmq.Socket
	batch  *libzmq.Batch
	seq    uint64 // of the next message
	// idle is called when the socket is empty.
	idle func(*batchReceive) error
	left time.Duration // time until pause gives up
}

func newBatchReceive(s childSetup, idle func(*batchReceive) error) (work, error) {
	zctx, err := zmq4.NewContext()
	if err != nil {
		return nil, err
	}
	zs, err := zctx.NewSocket(zmq4.SUB)
	if err != nil {
		return nil, errors.Join(err, zctx.Term())
	}
	r := &batchReceive{zctx: zctx, batch: libzmq.NewBatch(batchMessages), idle: idle}
	err = errors.Join(zs.SetRcvhwm(10_000), zs.SetLinger(0), zs.SetSubscribe(""), zs.Connect(s.Address))
	if err == nil {
		r.socket, err = libzmq.Open(zs)
	}
	if err != nil {
		return nil, errors.Join(err, zs.Close(), zctx.Term())
	}
	return r, nil
}

func (r *batchReceive) do(n int) (sum uint64, err error) {
	r.left = bench.IdleLimit
	for got := 0; got < n; {
		r.batch.Release()
		if err := r.socket.Receive(r.batch); err != nil {
			return 0, fmt.Errorf("receive message %d: %w", r.seq, err)
		}
		taken := r.batch.Len()
		for _, m := range r.batch.Messages() {
			if m.Count != 3 || len(m.Frames[1]) != 8 || binary.BigEndian.Uint64(m.Frames[1]) != r.seq {
				return 0, fmt.Errorf("receive message %d: got %x", r.seq, m.Frames)
			}
			for _, f := range m.Frames {
				sum += uint64(len(f))
			}
			r.seq++
		}
		if got += taken; taken > 0 {
			r.left = bench.IdleLimit
		} else if err := r.idle(r); err != nil {
			return 0, fmt.Errorf("wait for message %d: %w", r.seq, err)
		}
	}
	return sum, nil
}

// pause sleeps so that messages accumulate.
func (r *batchReceive) pause() error {
	if r.left -= bench.IdlePause; r.left < 0 {
		return errors.New("there was none for long")
	}
	bench.Pause(bench.IdlePause)
	return nil
}

func (r *batchReceive) wait() error {
	timer := time.AfterFunc(bench.IdleLimit, r.socket.Interrupt)
	defer timer.Stop()
	return r.socket.Wait()
}

// Close closes the socket.
func (r *batchReceive) Close() error {
	r.batch.Release()
	return errors.Join(r.socket.Close(), r.zctx.Term())
}
