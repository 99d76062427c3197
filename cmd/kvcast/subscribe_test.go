package main

import (
	"bytes"
	"io"
	"iter"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// TestSubscribeSaysWhyASnapshotComes has streams that do not go on where they should.
func TestSubscribeSaysWhyASnapshotComes(t *testing.T) {
	accepted := func(mode kvcastv1.Accepted_Mode) client.Update {
		return client.Update{Message: &kvcastv1.SubscribeResponse{Accepted: &kvcastv1.Accepted{Epoch: "now", OldestSeq: 100, NewestSeq: 200, Mode: mode}}}
	}
	snapshot, resumed := accepted(kvcastv1.Accepted_MODE_SNAPSHOT), accepted(kvcastv1.Accepted_MODE_RESUME)
	begin := client.Update{Message: &kvcastv1.SubscribeResponse{SnapshotBegin: &kvcastv1.SnapshotBegin{Epoch: "now"}}}
	ended := func(p client.Position) client.Update {
		return client.Update{Interruption: &client.Interruption{Err: client.ErrEnded, Snapshot: p.IsZero()}, Position: p}
	}
	for name, tt := range map[string]struct {
		after   position
		updates []client.Update
		want    string // "" is nothing
	}{
		"a snapshot that was asked for": {position{}, []client.Update{snapshot, begin}, ""},
		"another epoch": {position{set: true, epoch: "then", seq: 150}, []client.Update{snapshot, begin},
			"then:150 is of another life of the server's journal than its epoch now, now (it was restarted, or is another server): a snapshot comes first\n"},
		"too old": {position{set: true, epoch: "now", seq: 5}, []client.Update{snapshot, begin},
			"the entries after seq 5 are no longer retained (the oldest is 100): a snapshot comes first\n"},
		"too old, by the seq alone": {position{set: true, seq: 5}, []client.Update{snapshot, begin},
			"the entries after seq 5 are no longer retained (the oldest is 100): a snapshot comes first\n"},
		"too far behind": {position{set: true, seq: 150}, []client.Update{resumed, begin},
			"the server no longer retains the entries that come next, as this was too far behind: a snapshot comes first\n"},
		"too old after an interruption": {position{}, []client.Update{snapshot, begin, ended(client.Position{Epoch: "now", Seq: 7}), snapshot, begin},
			"the stream ended: the server ended the stream; resuming after now:7 in 0s\nthe entries after seq 7 are no longer retained (the oldest is 100): a snapshot comes first\n"},
		"a snapshot that was announced": {position{set: true, seq: 150}, []client.Update{resumed, ended(client.Position{}), snapshot, begin},
			"the stream ended: the server ended the stream; resuming with a snapshot in 0s\n"},
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
			c := subscribeCmd{After: tt.after}
			if err := c.print(updates, newPrinter(io.Discard, "text"), &stderr); err != nil {
				t.Fatal(err)
			}
			if got := strings.ReplaceAll(stderr.String(), client.ErrEnded.Error(), "the server ended the stream"); got != tt.want {
				t.Errorf("it says\n%swant\n%s", got, tt.want)
			}
		})
	}
}
