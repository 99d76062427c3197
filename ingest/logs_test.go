package ingest_test

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/tinylib/msgp/msgp"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/test/harness"
)

func TestLogNamesSources(t *testing.T) {
	t.Parallel()
	var log harness.Log
	c := config.Config{Logger: log.Logger(), Workers: []config.Worker{
		{Name: "a", Sources: []config.Source{
			{Connect: "tcp://127.0.0.1:1", Replay: "tcp://127.0.0.1:3", DPSize: 2},
			{Connect: "tcp://127.0.0.1:5", Replay: "tcp://127.0.0.1:6"},
		}},
		{Name: "b", Sources: []config.Source{{Connect: "tcp://127.0.0.1:7"}}},
	}}
	_, stop := start(t, c, newRecorder(t))
	stop()
	log.Want(t,
		`level=INFO msg="reading source" worker=a source=0 connect=tcp://127.0.0.1:1 replay=tcp://127.0.0.1:3 ranks=2 first_rank=0`,
		`level=INFO msg="reading source" worker=a source=1 connect=tcp://127.0.0.1:5 replay=tcp://127.0.0.1:6 ranks=1 first_rank=0`,
		`level=INFO msg="reading source" worker=b source=0 connect=tcp://127.0.0.1:7 replay="" ranks=1 first_rank=0`,
	)
}

// TestChunksOfConnectorsAreLogged sends stores of a connector of four blocks, and of a size that is no multiple of the engine's.
func TestChunksOfConnectorsAreLogged(t *testing.T) {
	t.Parallel()
	var log harness.Log
	e := newEngine(t)
	c := worker(config.Source{Connect: e.mustBind("tcp://127.0.0.1:*")})
	c.Logger = log.Logger()
	r := newRecorder(t)
	_, stop := start(t, c, r)
	e.awaitSubscriber("")
	chunk := func(size int) []byte {
		chunk := storedBlocks(size, 2)
		return append(chunk[:len(chunk)-len("GPU")], "CPU"...)
	}
	e.publish(0, stored(1), chunk(4*blockSize), chunk(4*blockSize), chunk(blockSize+1))
	for !strings.Contains(r.next(), "batch") {
	}
	stop()
	log.Want(t,
		fmt.Sprintf(`level=WARN msg="blocks skipped: not the worker's block size" worker=w source=0 rank=0 seq=0 reason=block_size_mismatch block_size=%d want=%d `+
			`hint="a connector's chunks must be a multiple of the worker's block size, as LMCache's chunk_size"`, blockSize+1, blockSize),
		fmt.Sprintf(`level=WARN msg="a connector keeps blocks below device memory, and may not tell which it removes" worker=w source=0 rank=0 seq=0 `+
			`reason=chunks chunk_tokens=%d block_size=%d`, 4*blockSize, blockSize),
	)
}

// TestObjectsInPlaceOfBlocksAreLogged sends an event of the form that Mooncake's master has.
func TestObjectsInPlaceOfBlocksAreLogged(t *testing.T) {
	t.Parallel()
	var log harness.Log
	e := newEngine(t)
	c := worker(config.Source{Connect: e.mustBind("tcp://127.0.0.1:*")})
	c.Logger = log.Logger()
	r := newRecorder(t)
	_, stop := start(t, c, r)
	e.awaitSubscriber("")
	object := msgp.AppendMapHeader(nil, 4)
	for _, field := range [][2]string{{"event_type", "stored"}, {"object_key", "9af1_0_k"}, {"medium", "cpu"}} {
		object = msgp.AppendString(msgp.AppendString(object, field[0]), field[1])
	}
	e.publish(0, msgp.AppendArrayHeader(msgp.AppendString(object, "seq_hashes"), 0))
	for !strings.Contains(r.next(), "batch") {
	}
	stop()
	log.Want(t, `level=WARN msg="events skipped: blocks may be missing, or known although they are gone" worker=w source=0 rank=0 seq=0 reason=object_key_only `+
		`hint="the source names objects in place of blocks: remove it, and read the engines' own events"`)
}

func TestLogDescribesAcceptedTopics(t *testing.T) {
	t.Parallel()
	const names = `"a POD of 1 to 253 bytes of UTF-8 without control or format characters, ` +
		`and a MODEL of at most 1024 bytes of UTF-8 without control or format characters"`
	tests := []struct {
		name     string
		listener config.Listener
		topic    string
		want     string
	}{
		{"another form", config.Listener{}, "kv@p", "reason=foreign_topic want=kv@POD@MODEL topic=kv@p"},
		{"without the prefix", config.Listener{}, "p", "reason=foreign_topic want=kv@POD@MODEL topic=p"},
		{"no pattern matches", config.Listener{Topics: []string{"kv@a*", "kv@b*"}}, "kv@p@m",
			`reason=foreign_topic want="kv@POD@MODEL that matches kv@a* or kv@b*" topic=kv@p@m`},
		{"no pattern of a worker matches", config.Listener{Topics: []string{"kv@a*"}, Worker: "w"}, "kv@p@m",
			"reason=foreign_topic want=kv@a* topic=kv@p@m"},
		{"invalid name", config.Listener{}, "kv@\x1b@m", "reason=bad_name want=" + names + ` topic="kv@\x1b@m"`},
		{"too long", config.Listener{}, strings.Repeat("x", 3000),
			`reason=topic_too_long want="a topic of at most 2048 bytes" topic=` + strings.Repeat("x", 128)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var log harness.Log
			tt.listener.Bind = "tcp://127.0.0.1:*"
			r := newRecorder(t)
			in, stop := start(t, config.Config{
				Listeners: []config.Listener{tt.listener},
				Logger:    log.Logger(),
			}, r)
			e := newEngine(t)
			e.connect(in.Endpoints()[0])
			e.awaitSubscriber("")
			e.send(tt.topic, seqFrame(0), payload(0))
			e.send("kv@a@m", seqFrame(0), payload(0)) // is accepted
			r.next()
			stop()
			log.Want(t, `level=WARN msg="message refused" bind=tcp://127.0.0.1:* peer.address=127.0.0.1 `+tt.want)
		})
	}
}

// TestLogNamesThePeersThatAreDisconnected checks that each reason has its own line, however many
// peers are disconnected for other reasons.
func TestLogNamesThePeersThatAreDisconnected(t *testing.T) {
	t.Parallel()
	var log harness.Log
	registry := prometheus.NewRegistry()
	in, stop := start(t, config.Config{
		Logger: log.Logger(), Metrics: registry, ListenZMQ: config.ZMQNative, Listeners: []config.Listener{{Bind: "tcp://127.0.0.1:*"}},
	}, newRecorder(t))
	signature := append(append([]byte{0xff}, make([]byte, 8)...), 0x7f)
	plain := append(append(append(signature[:10:10], 3, 0), "PLAIN"...), make([]byte, 47)...)
	for i, peer := range [][]byte{[]byte("GET / HTTP/1.1\r\n\r\n"), append(signature[:10:10], 1, 2), plain} {
		c, err := new(net.Dialer).DialContext(t.Context(), "tcp", strings.TrimPrefix(in.Endpoints()[0], "tcp://"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(peer); err != nil {
			t.Fatal(err)
		}
		harness.WaitFor(t, func() bool {
			return harness.Gather(t, registry).Sum("kvcast_ingest_peers_rejected_total") == float64(i+1)
		})
		_ = c.Close()
	}
	stop()
	for _, want := range []string{"protocol", "version", "mechanism"} {
		if line := `msg="peer disconnected" peer.address=127.0.0.1 reason=` + want; !strings.Contains(log.String(), line) {
			t.Errorf("the log has no %s:\n%s", line, log.String())
		}
	}
}

// A worker of a listener has the model that its topic names, which may be none.
func TestWorkersWithoutModelAreLogged(t *testing.T) {
	t.Parallel()
	for topic, want := range map[string]int{"kv": 1, "kv@p@m": 0} {
		var log harness.Log
		r := newRecorder(t)
		in, stop := start(t, config.Config{Logger: log.Logger(), Listeners: []config.Listener{{Bind: "tcp://127.0.0.1:*", Worker: "w"}}}, r)
		e := newEngine(t)
		e.connect(in.Endpoints()[0])
		e.awaitSubscriber("")
		e.send(topic, seqFrame(0), payload(0))
		r.next() // the worker
		r.next() // the batch
		stop()
		line := "level=WARN msg=\"" + config.NoTopicModel + "\" worker=w peer.address=127.0.0.1\n"
		if n := strings.Count(log.String(), line); n != want {
			t.Errorf("topic %s: logged %d times, want %d:\n%s", topic, n, want, log.String())
		}
	}
}
