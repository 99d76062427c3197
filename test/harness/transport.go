package harness

import (
	"testing"

	"github.com/kvcast/kvcast/ingest/config"
)

// ForEachTransport runs a subtest with each implementation of ZeroMQ. It skips libzmq in builds
// without cgo.
func ForEachTransport(t *testing.T, test func(t *testing.T, zmq config.ZMQ)) {
	t.Helper()
	for _, zmq := range []config.ZMQ{config.ZMQNative, config.ZMQLib} {
		t.Run(string(zmq), func(t *testing.T) {
			if !zmq.Available() {
				t.Skip("skipped: want " + config.AllowedZMQ())
			}
			test(t, zmq)
		})
	}
}
