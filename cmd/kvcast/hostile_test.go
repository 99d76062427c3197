package main_test

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/rawzmtp"
	"github.com/kvcast/kvcast/internal/simulator"
)

// attackTime bounds one attack, and patience what must come of it.
const (
	attackTime = 10 * time.Second
	patience   = 2 * time.Minute
)

// residentMiB is the resident memory of a process, in MiB.
func (p *process) residentMiB() int {
	p.t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var kib int
		if _, err := fmt.Sscanf(line, "VmRSS: %d kB", &kib); err == nil {
			return kib >> 10
		}
	}
	p.t.Fatal("no VmRSS in /proc")
	return 0
}

// attack connects to a bound port as a publisher.
func attack(t *testing.T, endpoint string) *rawzmtp.Conn {
	t.Helper()
	c, err := rawzmtp.Publish(strings.TrimPrefix(endpoint, "tcp://"), patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() }) // most are reset by then
	return c
}

// batchOf is the payload of a batch that stores a block.
func batchOf(t *testing.T, hash uint64) []byte {
	t.Helper()
	var e wire.Encoder
	return e.AppendBatch(nil, &wire.Batch{Time: 1, HasTime: true, Events: []wire.Event{storedOf(hash)}})
}

// flood sends messages as fast as they are taken, each followed by a PING, until the
// time is over or the peer takes no more.
func flood(t *testing.T, c *rawzmtp.Conn, topic string) {
	t.Helper()
	go c.Drain()
	end := time.Now().Add(attackTime)
	payload := batchOf(t, 1)
	for seq := uint64(0); seq < 400_000; seq++ {
		c.Message([]byte(topic), binary.BigEndian.AppendUint64(nil, seq), payload)
		c.Ping()
		if c.Buffered() < 64<<10 {
			continue
		}
		if err := c.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
			t.Fatal(err)
		}
		if err := c.Flush(); err != nil || time.Now().After(end) {
			return
		}
	}
}

// honest is an engine beside an attack, and what routers get of it.
type honest struct {
	t         *testing.T
	publisher *simulator.Publisher
	follower  *following
	next      uint64
}

func newHonest(t *testing.T, s *process, endpoint string) *honest {
	t.Helper()
	p := publisherOf(t, simulator.SocketConfig{
		Endpoint: endpoint, Mode: simulator.ModeConnect, Topic: "kv@127.0.0.1@honest", Replay: "tcp://127.0.0.1:5558",
	})
	if err := p.Subscribed(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	return &honest{t: t, publisher: p, follower: follow(t, s)}
}

// A peer that floods with PINGs between its messages and then resets the connection
// must not end the process: libzmq aborts when input that it stopped at a high-water
// mark goes on after an error.
func TestPeerThatFloodsAndResetsCannotEndTheProcess(t *testing.T) {
	t.Run("bound", func(t *testing.T) {
		s := serve(t, "--bind", "tcp://127.0.0.1:*")
		endpoint := s.endpoint()
		for range 5 {
			c := attack(t, endpoint)
			flood(t, c, "kv@127.0.0.9@m")
			if err := c.Reset(); err != nil {
				t.Fatal(err)
			}
		}
		s.client() // addr waits for the server
		if rss := s.residentMiB(); rss > 1024 {
			t.Errorf("%d MiB resident after the flood", rss)
		}
	})
	t.Run("connected", func(t *testing.T) {
		l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = l.Close() }()
		s := serve(t, "--worker", fmt.Sprintf("name=w,connect=tcp://%v", l.Addr()))
		for range 3 {
			c, err := rawzmtp.Accept(l, patience)
			if err != nil {
				t.Fatal(err)
			}
			flood(t, c, "")
			if err := c.Reset(); err != nil {
				t.Fatal(err)
			}
		}
		s.addr()
		if rss := s.residentMiB(); rss > 1024 {
			t.Errorf("%d MiB resident after the flood", rss)
		}
	})
}
