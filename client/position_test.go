package client_test

import (
	"encoding/json"
	"testing"

	"github.com/kvcast/kvcast/client"
)

func TestPositions(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]client.Position{
		"e:5":                    {Epoch: "e", Seq: 5},
		":5":                     {Seq: 5},
		"a:b:7":                  {Epoch: "a:b", Seq: 7},
		"e:18446744073709551615": {Epoch: "e", Seq: 1<<64 - 1},
	} {
		got, err := client.ParsePosition(text)
		if err != nil || got != want || got.String() != text {
			t.Errorf("%q: got %+v (%v), error %v; want %+v", text, got, got, err, want)
		}
	}
	for _, text := range []string{"", "5", "e:", "e:-1", "e:18446744073709551616", "e:x", "e:5 "} {
		if got, err := client.ParsePosition(text); err == nil {
			t.Errorf("%q is parsed as %v, want an error", text, got)
		}
	}
	var stored struct{ None, Some client.Position }
	b, err := json.Marshal(struct{ None, Some client.Position }{Some: client.Position{Epoch: "e", Seq: 5}})
	if err == nil {
		err = json.Unmarshal(b, &stored)
	}
	if err != nil || !stored.None.IsZero() || stored.Some.String() != "e:5" || string(b) != `{"None":"","Some":"e:5"}` {
		t.Errorf("as JSON %s, and back %+v, error %v", b, stored, err)
	}
}
