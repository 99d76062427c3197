package native_test

import (
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/native"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/test/rawzmtp"
)

// TestReceivingDoesNotAllocate checks that messages are read into pooled buffers.
func TestReceivingDoesNotAllocate(t *testing.T) {
	testclass.WithoutRace(t)
	r, endpoint, err := native.New(native.Config{}).Bind("tcp://127.0.0.1:*", nil)
	receiver := read(t)(r, err)
	c, err := rawzmtp.Dial(t.Context(), zmtp.PUB, strings.TrimPrefix(endpoint, "tcp://"), patience)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	receiver.want(transport.Connected)
	const messages = 512
	payload := make([]byte, 100)
	burst := func() {
		for range messages {
			c.Message([]byte("topic"), payload[:8], payload)
		}
		if err := c.Flush(); err != nil {
			t.Fatal(err)
		}
		for n := 0; n < messages; {
			chunk := receiver.take()
			receiver.chunk = nil
			n += len(chunk.Messages)
			receiver.Recycle(chunk)
		}
	}
	for range 10 {
		burst() // fills the pools
	}
	allocations := testing.AllocsPerRun(200, burst) / messages
	// A wait makes a timer, and a collection empties the pools.
	if allocations > 0.1 {
		t.Errorf("%v allocations a message", allocations)
	}
}
