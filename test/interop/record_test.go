package interop_test

import (
	"encoding/binary"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/native"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/test/harness"
)

var record = flag.String("record", "", "a folder to write what publishers send to, for the tests of internal/zmtp; empty: one that is deleted")

// TestRecord records what each library's publisher sends to a subscriber, and its router to a dealer:
// the handshake, messages, and the PINGs or PONGs that the library has.
func TestRecord(t *testing.T) {
	testclass.Peers(t)
	eachLibrary(t, 0, func(t *testing.T, l library) {
		for _, tt := range []struct {
			name    string
			needs   ability
			setup   setup
			command string // that the recording must have
		}{
			{name: "pub", setup: setup{transport: native.New(native.Config{Limits: zmtp.Limits{Heartbeat: heartbeat}})}, command: "\x04PONG"},
			{name: "pub-heartbeats", needs: pings, setup: setup{heartbeat: 200 * time.Millisecond}, command: "\x04PING"},
		} {
			if l.can&tt.needs != tt.needs {
				continue
			}
			t.Run(tt.name, func(t *testing.T) {
				tt.setup.side, tt.setup.relayed = weConnect, true
				k := l.open(t, tt.setup)
				if l.can&(pongs|tt.needs) != 0 {
					harness.WaitFor(t, func() bool {
						sent, _ := k.relay.recorded()
						return strings.Contains(sent, tt.command)
					})
				}
				for _, sizes := range [][]int{{}, {300}, {8, 100}} {
					k.publish("kv@topic", sizes...)
					k.wantMessage("kv@topic", sizes...)
				}
				k.relay.save(t, l.name+"-"+tt.name)
			})
		}
		if l.can&routes == 0 {
			return
		}
		t.Run("router", func(t *testing.T) {
			p := l.start(t, arguments{kind: "router", how: "bind", endpoint: "tcp://127.0.0.1:0"})
			to := newRelay(t, p.endpoint, weConnect, 0)
			receiver, err := native.New(native.Config{}).Request(to.endpoint(), nil, nil, binary.BigEndian.AppendUint64(nil, 98))
			if err != nil {
				t.Fatal(err)
			}
			r := newReader(t, receiver)
			r.want(transport.Connected)
			for range 3 {
				r.next()
			}
			to.save(t, l.name+"-router")
		})
	})
}

// save writes what the peer has sent.
func (r *relay) save(t *testing.T, name string) {
	t.Helper()
	sent, _ := r.recorded()
	dir := *record
	if dir == "" {
		dir = t.TempDir()
	}
	if err := os.WriteFile(filepath.Join(dir, name+".bin"), []byte(sent), 0o644); err != nil {
		t.Fatal(err)
	}
}
