package transport_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/internal/transport"
)

// scriptedTransport has replay sockets whose connections have given events, and then end.
type scriptedTransport struct {
	transport.Transport
	events []transport.Event
}

func (s *scriptedTransport) Request(string, func(int), ...[]byte) (transport.Receiver, error) {
	return &scriptedReceiver{events: s.events}, nil
}

type scriptedReceiver struct {
	transport.Receiver
	events []transport.Event
}

func (r *scriptedReceiver) Next(func() time.Time) (*transport.Chunk, error) {
	if len(r.events) == 0 {
		return nil, transport.ErrEnded
	}
	c := &transport.Chunk{Events: r.events[:1]}
	r.events = r.events[1:]
	return c, nil
}

func (r *scriptedReceiver) Recycle(*transport.Chunk) {}
func (r *scriptedReceiver) Interrupt()               {}
func (r *scriptedReceiver) Close() error             { return nil }

func TestReplayErrorSaysHowTheConnectionEnded(t *testing.T) {
	failed := errors.New("cause")
	for _, tt := range []struct {
		name   string
		events []transport.Event
		want   error
		text   string
	}{
		{"not connected", []transport.Event{{Kind: transport.Failed, Err: failed}}, transport.ErrReplayRefused, "nothing listens there"},
		{"ended", []transport.Event{{Kind: transport.Connected}, {Kind: transport.Disconnected}}, transport.ErrReplayBroken,
			"the connection has ended before the end of the answer"},
		{"ended by a message", []transport.Event{{Kind: transport.Connected}, {Kind: transport.Disconnected, Err: transport.TooLong(9 << 20)}},
			transport.ErrTooLong, "message is too long: 9437184 bytes, want at most 8388608"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := transport.NewRequests(&scriptedTransport{events: tt.events}, time.Hour, nil, prometheus.NewGaugeVec(prometheus.GaugeOpts{}, []string{"state"}))
			err := r.Replay(t.Context(), transport.Request{Endpoint: "tcp://127.0.0.1:1", From: 7}, func(uint64, []byte) bool { return true })
			if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) || !strings.HasPrefix(err.Error(), "replay from 7: ") {
				t.Errorf("got %v, want %v with %q", err, tt.want, tt.text)
			}
		})
	}
}
