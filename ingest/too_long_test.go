package ingest_test

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/test/harness"
)

// TestLogNamesBatchesThatAreTooLong has a batch above the limit, live and in the replay. With libzmq the message is refused; the
// native transport closes the connection.
func TestLogNamesBatchesThatAreTooLong(t *testing.T) {
	t.Parallel()
	const most = 8 << 20
	harness.ForEachTransport(t, func(t *testing.T, zmq config.ZMQ) {
		e := newEngine(t)
		ready := make(chan struct{})
		close(ready)
		var published atomic.Bool
		replay := newReplier(t, ready, func(uint64) [][]any {
			if !published.Load() {
				return [][]any{endOfReplay}
			}
			long := reply(1, 11)
			long[3] = largest(1)
			return [][]any{reply(0, 10), long, reply(2, 12), endOfReplay}
		})
		var log harness.Log
		c := worker(config.Source{Connect: e.mustBind("tcp://127.0.0.1:*"), Replay: replay})
		c.Logger, c.ConnectZMQ, c.ReplayTimeout = log.Logger(), zmq, harness.Timeout/2
		r := newRecorder(t)
		_, stop := start(t, c, &plain{r})
		e.awaitSubscriber("")
		e.publish(0, stored(10))
		r.want("add w model m block_size 0 ranks [0]", "batch 0 +[10]")
		published.Store(true)
		e.send("", seqFrame(1), largest(1))
		if zmq == config.ZMQNative {
			e.awaitSubscriber("")
		}
		e.publish(3, stored(13))
		for line := ""; line != "batch 3 +[13]"; line = r.next() {
		}
		stop()
		sizes := fmt.Sprintf("%d bytes, want at most %d", most+1, most)
		wants := []string{
			`msg="message refused" worker=w reason=message_too_long want="a payload of at most 8388608 bytes" bytes=8388609`,
			`msg="batch rejected" worker=w source=0 rank=0 seq=1 error="message is too long: ` + sizes,
			`cause="message is too long: ` + sizes,
		}
		if zmq == config.ZMQNative {
			wants = []string{
				`msg="connection ended: a message is too long" worker=w endpoint=`,
				`error="message is too long: frame of ` + sizes,
				`msg="replay failed" worker=w source=0 rank=0 endpoint=` + replay + ` error="replay from 0: the connection has ended before the end of the answer: message is too long: frame of ` + sizes,
				`msg="batches lost" worker=w source=0 rank=0 reason=possible_restart missed=0 first_seq=0 last_seq=0 ` +
					`cause="replay from 0: the connection has ended before the end of the answer: message is too long: frame of ` + sizes,
			}
		}
		for _, want := range wants {
			if !strings.Contains(log.String(), want) {
				t.Errorf("the log has no %s", want)
			}
		}
		if strings.Contains(log.String(), "nothing listens") {
			t.Error("the log says that nothing listens")
		}
		if t.Failed() {
			t.Log(log.String())
		}
	})
}
