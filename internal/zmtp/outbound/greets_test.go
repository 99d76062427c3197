package outbound_test

import (
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/internal/zmtp/outbound"
)

func TestReadGreeting(t *testing.T) {
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
			err := outbound.ReadGreeting(strings.NewReader(tt.sends))
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}
