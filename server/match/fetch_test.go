package match_test

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/match"
)

func TestFetchEndpoint(t *testing.T) {
	for _, tt := range []struct {
		label, endpoint string
		rank            uint32
		want            string
	}{
		{"", "h:1", 0, ""},
		{"25000", "h:1", 0, "tcp://h:25000"},
		{"25000", "[::1]:1", 2, "tcp://[::1]:25002"},
		{"tcp://g:7", "h:1", 1, "tcp://g:8"},
		{"tcp://[::1]:7", "", 0, "tcp://[::1]:7"},
		{"25000", "", 0, ""},
		{"25000", "no port", 0, ""},
		{"25000", ":1", 0, ""},
		{"0", "h:1", 0, ""},
		{"65535", "h:1", 0, "tcp://h:65535"},
		{"65535", "h:1", 1, ""},
		{"-1", "h:1", 2, ""},
		{"a", "h:1", 0, ""},
		{"udp://h:1", "h:1", 0, ""},
		{"tcp://:1", "h:1", 0, ""},
	} {
		m := index.Match{Worker: "w", Endpoint: tt.endpoint, Labels: map[string]string{match.FetchLabel: tt.label}, RankIndex: tt.rank}
		r := match.Response{WithHashes: true, Matches: index.Matches{Prompts: [][]index.Match{{m}}}}
		r.Size()
		got := new(kvcastv1.MatchPrefixResponse)
		if err := proto.Unmarshal(r.Append(nil), got); err != nil {
			t.Fatal(err)
		}
		if endpoint := got.GetPrompts()[0].GetMatches()[0].GetFetchEndpoint(); endpoint != tt.want {
			t.Errorf("label %q and endpoint %q, rank %d: got %q, want %q", tt.label, tt.endpoint, tt.rank, endpoint, tt.want)
		}
	}
}
