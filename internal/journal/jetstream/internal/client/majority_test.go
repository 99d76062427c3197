package client

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// TestLeadersWithoutAMajorityAreNotBelieved has what a leader tells of its replicas.
func TestLeadersWithoutAMajorityAreNotBelieved(t *testing.T) {
	peer := func(active time.Duration) *jetstream.PeerInfo { return &jetstream.PeerInfo{Active: active} }
	offline := &jetstream.PeerInfo{Offline: true}
	lately, long := peer(peerSilence), peer(peerSilence+1)
	for name, c := range map[string]struct {
		cluster *jetstream.ClusterInfo
		want    bool
	}{
		"one server":               {nil, true},
		"one replica":              {&jetstream.ClusterInfo{}, true},
		"both":                     {&jetstream.ClusterInfo{Replicas: []*jetstream.PeerInfo{lately, lately}}, true},
		"one of two":               {&jetstream.ClusterInfo{Replicas: []*jetstream.PeerInfo{long, lately}}, true},
		"none":                     {&jetstream.ClusterInfo{Replicas: []*jetstream.PeerInfo{long, long}}, false},
		"one and one is offline":   {&jetstream.ClusterInfo{Replicas: []*jetstream.PeerInfo{lately, offline}}, true},
		"none, and one is offline": {&jetstream.ClusterInfo{Replicas: []*jetstream.PeerInfo{long, offline}}, false},
		"half of two":              {&jetstream.ClusterInfo{Replicas: []*jetstream.PeerInfo{long}}, false},
		"two of four":              {&jetstream.ClusterInfo{Replicas: []*jetstream.PeerInfo{lately, lately, long, long}}, true},
		"one of four":              {&jetstream.ClusterInfo{Replicas: []*jetstream.PeerInfo{lately, long, long, long}}, false},
	} {
		if err := HearsMajority(c.cluster); (err == nil) != c.want {
			t.Errorf("%s: got %v, want it to be believed: %t", name, err, c.want)
		}
	}
}
