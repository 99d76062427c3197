//go:build cgo

package libzmq

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/internal/transport"
)

// options are the socket options that can be read. The option of ZMTP heartbeats cannot be read;
// heartbeats are off by default.
type options struct {
	IPv6                              bool
	Keepalive, Idle, Interval, Count  int
	Linger, ConnectTimeout, Handshake time.Duration
	ReceiveHWM                        int
	MaxMessage                        int64
}

func optionsOf(t *testing.T, s *zmq4.Socket) (o options) {
	t.Helper()
	var errs [10]error
	o.IPv6, errs[0] = s.GetIpv6()
	o.Keepalive, errs[1] = s.GetTcpKeepalive()
	o.Idle, errs[2] = s.GetTcpKeepaliveIdle()
	o.Interval, errs[3] = s.GetTcpKeepaliveIntvl()
	o.Count, errs[4] = s.GetTcpKeepaliveCnt()
	o.Linger, errs[5] = s.GetLinger()
	o.ConnectTimeout, errs[6] = s.GetConnectTimeout()
	o.Handshake, errs[7] = s.GetHandshakeIvl()
	o.ReceiveHWM, errs[8] = s.GetRcvhwm()
	o.MaxMessage, errs[9] = s.GetMaxmsgsize()
	if err := errors.Join(errs[:]...); err != nil {
		t.Fatal(err)
	}
	return o
}

func TestSocketsHaveTheirOptions(t *testing.T) {
	t.Parallel()
	c, err := New(Config{MaxSockets: 100})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}()
	common := options{
		IPv6: true, Keepalive: 1, Idle: 30, Interval: 10, Count: 3,
		ConnectTimeout: 5 * time.Second, Handshake: 5 * time.Second, ReceiveHWM: 0,
	}
	for _, tt := range []struct {
		name       string
		open       func() (*zmq4.Socket, error)
		maxMessage int64
	}{
		{"connected", func() (*zmq4.Socket, error) { return c.socket(zmq4.SUB, maxFrameBytes, "") }, 64 << 20},
		{"bound", func() (*zmq4.Socket, error) { return c.socket(zmq4.SUB, transport.MaxPayloadBytes, "") }, 8 << 20},
		{"replay", func() (*zmq4.Socket, error) { return c.socket(zmq4.DEALER, maxFrameBytes, "") }, 64 << 20},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, err := tt.open()
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := s.Close(); err != nil {
					t.Error(err)
				}
			}()
			want := common
			want.MaxMessage = tt.maxMessage
			if d := cmp.Diff(want, optionsOf(t, s)); d != "" {
				t.Errorf("options (-want +got):\n%s", d)
			}
		})
	}
}
