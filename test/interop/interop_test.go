package interop_test

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/native"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/test/harness"
)

// messages are the sizes of the frames after the first one.
var messages = [][]int{
	{}, {0}, {1}, {8, 0}, {8, 1}, {8, 255}, {8, 256}, {8, 4 << 10}, {8, 64<<10 - 30}, {8, 64 << 10}, {8, 1 << 20}, {8, 3},
	{8, 300, 3}, {1, 2, 3, 4, 5, 6}, {100_000, 100_000, 100_000, 0}, {8, 8 << 20}, {8, 100},
}

// TestMessagesArrive checks that all messages of the subscribed topics arrive, over IPv4, IPv6 and
// Unix sockets.
func TestMessagesArrive(t *testing.T) {
	testclass.Peers(t)
	eachLibrary(t, 0, func(t *testing.T, l library) {
		for _, network := range []string{"IPv4", "IPv6", "ipc"} {
			for _, side := range sides {
				t.Run(network+", "+string(side), func(t *testing.T) {
					endpoint := map[string]string{"IPv4": "tcp://127.0.0.1:*", "IPv6": "tcp://[::1]:*", "ipc": ipcEndpoint(t)}[network]
					switch {
					case network == "IPv6":
						requireIPv6(t)
					case network == "ipc" && l.can&ipc == 0:
						t.Skip("the library has no Unix sockets")
					}
					k := l.open(t, setup{side: side, endpoint: endpoint})
					for _, sizes := range messages {
						k.publish("other", sizes...)
						k.publish("kv@topic", sizes...)
					}
					for _, sizes := range messages {
						if side == theyConnect { // listeners subscribe to all topics
							k.wantMessage("other", sizes...)
						}
						k.wantMessage("kv@topic", sizes...)
					}
					k.kill()
					k.want(transport.Disconnected)
				})
			}
		}
	})
}

func requireIPv6(t *testing.T) {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "[::1]:0")
	if err != nil {
		t.Skip(err)
	}
	_ = l.Close()
}

// TestOversizedFrameIsRefused checks that the peer of a frame above the limit is disconnected with
// its reason, and that the next connection works.
func TestOversizedFrameIsRefused(t *testing.T) {
	testclass.Peers(t)
	eachLibrary(t, 0, func(t *testing.T, l library) {
		for _, side := range sides {
			t.Run(string(side), func(t *testing.T) {
				rejected := make(chan zmtp.Reason, 10)
				k := l.open(t, setup{side: side, transport: native.New(native.Config{
					OnReject: func(_ netip.Addr, err *zmtp.Error) {
						if l.can&hangs == 0 || err.Reason != zmtp.ReasonHandshake {
							rejected <- err.Reason
						}
					},
				})})
				k.publish("kv@large", 64<<20)
				k.wantReason(zmtp.ReasonBytes)
				if side == theyConnect {
					if got := <-rejected; got != zmtp.ReasonBytes {
						t.Errorf("rejected for %q", got)
					}
				}
				if side == weConnect || l.can&reconnects == 0 {
					k.connect(t)
				}
				k.synchronize(t)
				k.publish("kv@topic", 8<<20)
				k.wantMessage("kv@topic", 8<<20)
				if n := len(rejected); n > 0 {
					t.Errorf("%d more rejections", n)
				}
			})
		}
	})
}

// TestPeerKilledInMessage kills a peer of whose message a part has arrived, and starts another.
func TestPeerKilledInMessage(t *testing.T) {
	testclass.Peers(t)
	const messageBytes, passed = 24 << 20, 1 << 20 // the rest exceeds what sockets buffer
	eachLibrary(t, 0, func(t *testing.T, l library) {
		for _, side := range sides {
			t.Run(string(side), func(t *testing.T) {
				tr := native.New(native.Config{LargeBytes: 2 * messageBytes, Limits: zmtp.Limits{FrameBytes: messageBytes, Bytes: 2 * messageBytes}})
				k := l.open(t, setup{side: side, transport: tr, relayed: true, pass: passed})
				k.publish("kv@large", messageBytes)
				harness.WaitFor(t, func() bool { return tr.LargeBytes() >= passed/2 })
				k.kill()
				k.relay.resume()
				k.want(transport.Disconnected)
				if n := tr.LargeBytes(); n != 0 {
					t.Errorf("%d bytes of incomplete messages", n)
				}
				k = l.open(t, setup{side: side, transport: tr})
				k.publish("kv@large", messageBytes)
				k.wantMessage("kv@large", messageBytes)
			})
		}
	})
}

// TestPingsOfPeerAreAnswered checks that a peer gets its PONGs, and stays connected.
func TestPingsOfPeerAreAnswered(t *testing.T) {
	testclass.Peers(t)
	eachLibrary(t, pings, func(t *testing.T, l library) {
		for _, side := range sides {
			t.Run(string(side), func(t *testing.T) {
				k := l.open(t, setup{side: side, heartbeat: 50 * time.Millisecond, relayed: true})
				harness.WaitFor(t, func() bool {
					_, got := k.relay.recorded()
					return strings.Count(got, "\x04PONG") >= 3
				})
				k.publish("kv@topic", 10)
				k.wantMessage("kv@topic", 10)
			})
		}
	})
}

const (
	// heartbeat is how long a peer may be silent that is to be disconnected.
	heartbeat = time.Second
	// answeredHeartbeat is longer than a peer takes to answer, on a machine that other programs use too.
	answeredHeartbeat = 15 * time.Second
)

// TestPeerAnswersPings checks that a silent peer that answers PINGs stays connected. A peer of ZMTP
// 3.0 gets none.
func TestPeerAnswersPings(t *testing.T) {
	testclass.Peers(t)
	eachLibrary(t, pongs, func(t *testing.T, l library) {
		for _, side := range sides {
			t.Run(string(side), func(t *testing.T) {
				t.Parallel()
				k := l.open(t, setup{side: side, relayed: true, transport: native.New(native.Config{Limits: zmtp.Limits{Heartbeat: answeredHeartbeat}})})
				harness.WaitFor(t, func() bool {
					sent, _ := k.relay.recorded()
					return strings.Contains(sent, "\x04PONG")
				})
				k.publish("kv@topic", 10)
				k.wantMessage("kv@topic", 10)
			})
		}
	})
}

// TestSilentPeerIsDisconnected stops a peer's process. Its system still acknowledges what arrives,
// so that only the missing PONG tells.
func TestSilentPeerIsDisconnected(t *testing.T) {
	testclass.Peers(t)
	eachLibrary(t, pongs, func(t *testing.T, l library) {
		for _, side := range sides {
			t.Run(string(side), func(t *testing.T) {
				t.Parallel()
				k := l.open(t, setup{side: side, transport: native.New(native.Config{Limits: zmtp.Limits{Heartbeat: heartbeat}})})
				began := time.Now()
				if err := k.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
					t.Fatal(err)
				}
				k.wantReason(zmtp.ReasonHeartbeat)
				t.Logf("disconnected after %v", time.Since(began))
			})
		}
	})
}

// TestReplay requests batches from a router.
func TestReplay(t *testing.T) {
	testclass.Peers(t)
	eachLibrary(t, routes, func(t *testing.T, l library) {
		p := l.start(t, arguments{kind: "router", how: "bind", endpoint: "tcp://127.0.0.1:*"})
		requests := transport.NewRequests(native.New(native.Config{}), harness.Timeout, nil,
			prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "requests"}, []string{"state"}))
		requests.FirstReply = harness.Timeout
		for _, from := range []uint64{0, 42, 99, 100} {
			next := from
			err := requests.Replay(context.Background(), transport.Request{Endpoint: p.endpoint, From: from}, func(seq uint64, payload []byte) bool {
				if seq != next || string(payload) != string(frame(int(seq))) {
					t.Errorf("got batch %d of %d bytes, want batch %d", seq, len(payload), next)
				}
				next++
				return true
			})
			if err != nil || next != 100 {
				t.Errorf("replay from %d ended before %d: %v", from, next, err)
			}
		}
	})
}
