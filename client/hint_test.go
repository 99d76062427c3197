package client_test

import (
	"encoding/json"
	"testing"

	"github.com/kvcast/kvcast/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

func TestFetchHint(t *testing.T) {
	const device, host = kvcastv1.Tier_TIER_DEVICE, kvcastv1.Tier_TIER_HOST_PINNED
	source := client.Match{Blocks: 4, FetchEndpoint: "tcp://h:1", BlockHashes: []uint64{1, 2, 1<<64 - 1}}
	source.TierBlocks[device], source.TierBlocks[host] = 4, 2
	without := source
	without.FetchEndpoint = ""
	for _, tt := range []struct {
		name   string
		source client.Match
		held   int
		tiers  []kvcastv1.Tier
		want   string // block hashes
	}{
		{"all tiers", source, 0, nil, "[1,2,18446744073709551615]"},
		{"one tier", source, 1, []kvcastv1.Tier{host}, "[1,2]"},
		{"two tiers", source, 1, []kvcastv1.Tier{host, device}, "[1,2,18446744073709551615]"},
		{"a tier without blocks", source, 0, []kvcastv1.Tier{kvcastv1.Tier_TIER_DISK}, ""},
		{"as many are held", source, 3, nil, ""},
		{"no endpoint", without, 0, nil, ""},
		{"no hashes", client.Match{Blocks: 4, FetchEndpoint: "tcp://h:1"}, 0, nil, ""},
	} {
		hints, ok := client.NewFetchHint("r1", &tt.source, tt.held, tt.tiers...)
		if !ok {
			if hints != nil || tt.want != "" {
				t.Errorf("%s: got no hint, want %s", tt.name, tt.want)
			}
			continue
		}
		got, err := json.Marshal(hints)
		want := `{"protocol_version":"0.1","message_id":"r1","actions":[{"action_id":"r1","action_type":"kv.fetch","action_version":"1.0",` +
			`"payload":{"source_control_endpoint":"tcp://h:1","block_hashes":` + tt.want + `}}]}`
		if err != nil || string(got) != want {
			t.Errorf("%s: got %s, %v; want %s", tt.name, got, err, want)
		}
	}
}
