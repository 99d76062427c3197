//go:build cgo

package cluster_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

// TestLibzmqEngineLeavesPausedServer pauses the server to which an engine has connected, and leaves the connection as it is: libzmq must close
// it by the TTL of the server's PINGs, though the engine publishes all the time.
func TestLibzmqEngineLeavesPausedServer(t *testing.T) {
	testclass.Cluster(t)
	url := natstest.Start(t)
	balancer := harness.NewProxy(t, "")
	w := &world{t: t, rng: rand.New(rand.NewPCG(*seed, 1)), js: natstest.JetStream(t, url)}
	t.Cleanup(w.writeLogs)
	var listeners []string
	for i := range 2 {
		address := fmt.Sprintf("127.0.0.1:%d", harness.FreePort(t))
		w.members = append(w.members, &member{
			name: fmt.Sprintf("server-%d", i), Server: fleet.NewServer(t, "--journal", url, "--bind", "tcp://"+address),
		})
		listeners = append(listeners, address)
	}
	w.restart(w.members...)
	from, to := w.members[0], w.members[1]
	// reads waits until a server reads the engine: only that one knows its sources.
	reads := func(m *member) {
		t.Helper()
		client := kvcastv1.NewRouterEventServiceClient(harness.Dial(t, m.Proxy.Addr()))
		harness.WaitFor(t, func() bool {
			list, err := client.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{})
			if err != nil {
				t.Fatal(err)
			}
			all := list.GetWorkers()
			return len(all) == 1 && len(all[0].GetSources()) == 1 && all[0].GetSources()[0].GetState() == kvcastv1.SourceState_SOURCE_STATE_LIVE
		})
	}
	balancer.Retarget(listeners[0])
	publish(t, "tcp://"+balancer.Addr(), "kv@engine@"+fleet.Model)
	reads(from)
	if err := from.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	balancer.Retarget(listeners[1]) // as one does that looks whether servers are ready
	reads(to)
	t.Logf("taken over within %v", time.Since(began).Round(time.Millisecond))
	if err := from.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	w.awaitReady(true)
	reads(to)
}

// publish publishes batches without events over libzmq, until the test ends.
func publish(t *testing.T, endpoint, topic string) {
	t.Helper()
	pub, err := zmq4.NewSocket(zmq4.PUB)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(pub.SetLinger(0), pub.Connect(endpoint)); err != nil {
		t.Fatal(err)
	}
	stop, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		pace := time.NewTicker(10 * time.Millisecond)
		defer pace.Stop()
		for seq := uint64(0); ; seq++ {
			at := math.Float64bits(float64(time.Now().UnixMilli()) / 1000)
			batch := append(binary.BigEndian.AppendUint64([]byte{0x92, 0xcb}, at), 0x90) // [at, []] in msgpack
			_, err := pub.SendMessage(topic, binary.BigEndian.AppendUint64(nil, seq), batch)
			select {
			case <-pace.C:
			case <-stop:
				ended <- errors.Join(err, pub.Close())
				return
			}
		}
	}()
	t.Cleanup(func() {
		close(stop)
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
