package outbound_test

import (
	"context"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/internal/zmtp/outbound"
)

func TestGreets(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, sends, want string
	}{
		{"a publisher", string(zmtp.AppendGreeting(nil)), ""},
		{"its signature alone", string(zmtp.AppendGreeting(nil)[:zmtp.SignatureBytes]), ""},
		{"a part of it", "\xff\x00", "EOF"},
		{"nothing", "", "EOF"},
		{"another protocol", "HTTP/1.1 400 Bad Request", "does not speak ZMTP"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := listen(t)
			go func() {
				if c, err := l.Accept(); err == nil {
					_, _ = io.WriteString(c, tt.sends)
					_ = c.Close()
				}
			}()
			err := outbound.Greets(t.Context(), "tcp", l.Addr().String())
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

// TestGreetsEndsWithItsContext connects to a listener that says nothing.
func TestGreetsEndsWithItsContext(t *testing.T) {
	t.Parallel()
	l := listen(t)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		if c, err := l.Accept(); err == nil {
			cancel()
			_, _ = io.Copy(io.Discard, c)
			_ = c.Close()
		}
	}()
	if err := outbound.Greets(ctx, "tcp", l.Addr().String()); err == nil {
		t.Error("no error, want one: the context has ended")
	}
	expired, cancelExpired := context.WithDeadline(t.Context(), time.Now())
	defer cancelExpired()
	if err := outbound.Greets(expired, "tcp", l.Addr().String()); err == nil {
		t.Error("no error, want one: the context has ended")
	}
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}
