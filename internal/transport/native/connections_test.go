package native_test

import (
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/native"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/test/rawzmtp"
)

// TestEndPrecedesTheNextConnection checks that a peer that closes a connection and opens the next
// is read in that order, also if the first has a backlog.
func TestEndPrecedesTheNextConnection(t *testing.T) {
	t.Parallel()
	const connections, messages = 300, 200
	r, endpoint, err := native.New(native.Config{}).Bind("tcp://127.0.0.1:*", nil)
	receiver := read(t)(r, err)
	sent := make(chan error, 1)
	go func() {
		sent <- func() error {
			for range connections {
				c, err := rawzmtp.Dial(t.Context(), zmtp.PUB, strings.TrimPrefix(endpoint, "tcp://"), patience)
				if err != nil {
					return err
				}
				for range messages {
					c.Message([]byte("topic"), make([]byte, 8), make([]byte, 1000))
				}
				if err := c.Flush(); err != nil {
					return err
				}
				if err := c.Close(); err != nil {
					return err
				}
			}
			return nil
		}()
	}()
	open, ended, received := 0, 0, 0
	for ended < connections {
		c := receiver.take()
		received += c.Each(func(e transport.Event) {
			switch e.Kind {
			case transport.Connected:
				open++
			case transport.Disconnected:
				open--
				ended++
			default:
			}
		}, func(m transport.Message) {
			if open != 1 && !t.Failed() {
				t.Errorf("message of connection %d while %d connections are open", m.Conn, open)
			}
		})
		receiver.chunk = nil
		receiver.Recycle(c)
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
	if want := connections * messages; received != want {
		t.Errorf("%d messages, want %d", received, want)
	}
}
