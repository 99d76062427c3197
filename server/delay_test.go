package server_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/server"
)

func TestDelayedKnowledgeIsOlder(t *testing.T) {
	at := time.Unix(1000, 0)
	k := server.Knowledge{Confirmed: map[string]time.Time{"w": at, "never": {}}, Others: at.Add(time.Second)}
	k.Delay(2*time.Second, 3*time.Second)
	want := server.Knowledge{Confirmed: map[string]time.Time{"w": at.Add(-2 * time.Second), "never": {}}, Others: at.Add(-time.Second), Limit: 3 * time.Second}
	if diff := cmp.Diff(want, k); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
