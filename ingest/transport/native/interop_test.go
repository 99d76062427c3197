package native_test

import (
	"encoding/binary"
	"testing"
	"time"

	gozmq "github.com/go-zeromq/zmq4"

	"github.com/kvcast/kvcast/ingest/transport"
	"github.com/kvcast/kvcast/ingest/transport/native"
)

// TestGoZeroMQ receives from a publisher of go-zeromq, which speaks ZMTP 3.0.
func TestGoZeroMQ(t *testing.T) {
	exchange := func(t *testing.T, pub gozmq.Socket, r *reader) {
		t.Helper()
		send := func(i uint64) {
			if err := pub.SendMulti(gozmq.NewMsgFrom([]byte("kv@x"), binary.BigEndian.AppendUint64(nil, i), make([]byte, i%1000))); err != nil {
				t.Fatal(err)
			}
		}
		// go-zeromq does not tell when a peer has subscribed: send until a message arrives.
		next := uint64(0)
		for ; r.chunk == nil; next++ {
			send(next)
			soon := time.Now().Add(10 * time.Millisecond)
			c, err := r.Next(func() time.Time { return soon })
			if err == nil {
				r.chunk, r.next = c, 0
			}
		}
		for want := binary.BigEndian.Uint64(r.message()[1]) + 1; want < next+500; want++ {
			if want >= next {
				send(want)
			}
			if m := r.message(); len(m) != 3 || binary.BigEndian.Uint64(m[1]) != want || len(m[2]) != int(want%1000) {
				t.Fatalf("message %d is %x", want, m[:2])
			}
		}
	}
	t.Run("binds", func(t *testing.T) {
		pub := gozmq.NewPub(t.Context())
		t.Cleanup(func() { _ = pub.Close() })
		if err := pub.Listen("tcp://127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		r := read(t)(native.New(native.Config{}).Subscribe("tcp://"+pub.Addr().String(), "kv@", nil))
		r.want(transport.Connected)
		exchange(t, pub, r)
	})
	t.Run("connects", func(t *testing.T) {
		r, address := bind(t, native.Config{})
		pub := gozmq.NewPub(t.Context())
		t.Cleanup(func() { _ = pub.Close() })
		if err := pub.Dial("tcp://" + address); err != nil {
			t.Fatal(err)
		}
		r.want(transport.Connected)
		exchange(t, pub, r)
	})
}
