package query

import (
	"bytes"
	"io"
	"iter"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/output"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// TestSubscribeReportsWhyASnapshotComes covers streams that cannot resume at the requested
// position.
func TestSubscribeReportsWhyASnapshotComes(t *testing.T) {
	accepted := func(mode kvcastv1.Accepted_Mode) client.Update {
		return client.Update{Message: &kvcastv1.SubscribeResponse{Accepted: &kvcastv1.Accepted{Epoch: "now", OldestSeq: 100, NewestSeq: 200, Mode: mode}}}
	}
	snapshot, resumed := accepted(kvcastv1.Accepted_MODE_SNAPSHOT), accepted(kvcastv1.Accepted_MODE_RESUME)
	begin := client.Update{Message: &kvcastv1.SubscribeResponse{SnapshotBegin: &kvcastv1.SnapshotBegin{Epoch: "now"}}}
	ended := func(p client.Position) client.Update {
		return client.Update{Interruption: &client.Interruption{Err: client.ErrEnded, Snapshot: p.IsZero()}, Position: p}
	}
	for name, tt := range map[string]struct {
		after   *client.Position
		updates []client.Update
		want    string // "" prints nothing
	}{
		"a requested snapshot": {nil, []client.Update{snapshot, begin}, ""},
		"another epoch": {&client.Position{Epoch: "then", Seq: 150}, []client.Update{snapshot, begin},
			"then:150 has another epoch than the server, now: the server was restarted, or is another server: starting from a snapshot\n"},
		"too old": {&client.Position{Epoch: "now", Seq: 5}, []client.Update{snapshot, begin},
			"the entries after seq 5 are no longer retained (the oldest is 100): starting from a snapshot\n"},
		"too old, by the seq alone": {&client.Position{Seq: 5}, []client.Update{snapshot, begin},
			"the entries after seq 5 are no longer retained (the oldest is 100): starting from a snapshot\n"},
		"too far behind": {&client.Position{Seq: 150}, []client.Update{resumed, begin},
			"fell behind: the next entries are no longer retained: continuing from a snapshot\n"},
		"too old after an interruption": {nil, []client.Update{snapshot, begin, ended(client.Position{Epoch: "now", Seq: 7}), snapshot, begin},
			"stream ended: the server ended the stream; resuming after now:7 in 0s\nthe entries after seq 7 are no longer retained (the oldest is 100): starting from a snapshot\n"},
		"a snapshot after an interruption": {&client.Position{Seq: 150}, []client.Update{resumed, ended(client.Position{}), snapshot, begin},
			"stream ended: the server ended the stream; resuming with a snapshot in 0s\n"},
	} {
		t.Run(name, func(t *testing.T) {
			updates := iter.Seq2[client.Update, error](func(yield func(client.Update, error) bool) {
				for _, u := range tt.updates {
					if !yield(u, nil) {
						return
					}
				}
			})
			var stderr bytes.Buffer
			c := Subscribe{After: tt.after}
			if err := c.print(updates, output.NewPrinter(io.Discard, "text"), &stderr); err != nil {
				t.Fatal(err)
			}
			if got := strings.ReplaceAll(stderr.String(), client.ErrEnded.Error(), "the server ended the stream"); got != tt.want {
				t.Errorf("got\n%swant\n%s", got, tt.want)
			}
		})
	}
}
