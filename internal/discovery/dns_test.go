package discovery

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
)

func TestDNS(t *testing.T) {
	worker := func(name, connect, replay string) config.Worker {
		return config.Worker{Name: name, Model: "m", BlockSize: 16, Sources: []config.Source{
			{Engine: feed.EngineSGLang, Copies: config.CopiesCounted, Connect: connect, Replay: replay},
		}}
	}
	tests := []struct {
		name      string
		addresses []string
		err       error
		replay    int
		want      []config.Worker
		wantErr   bool
	}{
		{"each address once, in order", []string{"10.0.0.2", "::ffff:10.0.0.1", "10.0.0.1"}, nil, 5558, []config.Worker{
			worker("10.0.0.1:5557", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"),
			worker("10.0.0.2:5557", "tcp://10.0.0.2:5557", "tcp://10.0.0.2:5558"),
		}, false},
		{"IPv6, no replay", []string{"fd00::1"}, nil, 0, []config.Worker{
			worker("[fd00::1]:5557", "tcp://[fd00::1]:5557", ""),
		}, false},
		{"no such name", nil, &net.DNSError{IsNotFound: true}, 0, []config.Worker{}, false},
		{"no name server", nil, errors.New("refused"), 0, nil, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := DNS{Host: "engines", Engines: Engines{Port: 5557, ReplayPort: tt.replay, Engine: feed.EngineSGLang, Copies: config.CopiesCounted, Model: "m", BlockSize: 16}}
			d.lookup = func(_ context.Context, _, host string) ([]netip.Addr, error) {
				if host != "engines" {
					t.Errorf("host %q", host)
				}
				var all []netip.Addr
				for _, a := range tt.addresses {
					all = append(all, netip.MustParseAddr(a))
				}
				return all, tt.err
			}
			got, err := d.Find(t.Context())
			if (err != nil) != tt.wantErr {
				t.Fatalf("error %v", err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
			for _, w := range got {
				if err := (config.Config{Workers: []config.Worker{w}}).Validate(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
