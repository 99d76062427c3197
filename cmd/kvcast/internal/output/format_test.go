package output_test

import (
	"bytes"
	"encoding/json"
	"testing"
	"unicode"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/output"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// TestJSONHasNoCharactersThatATerminalObeys draws names of any characters: each reader of JSON gets them as they are.
func TestJSONHasNoCharactersThatATerminalObeys(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		special := rapid.SampledFrom([]rune("a\u009b\u007f\u202e\u200b\ufeff\u2028\x1b[31m\U000e0041é漢😀\"\\\n"))
		name := rapid.StringOf(rapid.OneOf(special, rapid.Rune())).Draw(t, "name")
		var out bytes.Buffer
		if err := output.WriteJSON(&out, &kvcastv1.PrefixMatch{Worker: name}); err != nil {
			t.Fatal(err)
		}
		text, ended := bytes.CutSuffix(out.Bytes(), []byte("\n"))
		if i := bytes.IndexFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }); i >= 0 || !ended {
			t.Fatalf("got %q, with %q", text, text[max(i, 0):])
		}
		var got struct{ Worker string }
		if err := json.Unmarshal(text, &got); err != nil || got.Worker != name {
			t.Errorf("got %q, %v, want %q", got.Worker, err, name)
		}
	})
}
