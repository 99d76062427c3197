package access_test

import (
	"strings"
	"testing"

	"github.com/kvcast/kvcast/server/access"
)

func TestParseTokens(t *testing.T) {
	t.Parallel()
	const good = "0123456789abcdef"
	for _, tt := range []struct {
		name string
		text string
		want string // the error; empty: none
	}{
		{"both roles, comments, blank lines, CRLF", "# the gateway\r\n\r\nrouter " + good + "\r\n  \t\n  operator\t" + good + "x", ""},
		{"any visible character", "router !\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", ""},
		{"no token", "# a comment\n", "f: no token found: want at least one line ROLE TOKEN with the role router or operator"},
		{"no role", "\n" + good, "f:2: the line is not allowed: want two words, ROLE TOKEN"},
		{"a comment after the token", "router " + good + " # mine", "f:1: the line is not allowed: want two words, ROLE TOKEN"},
		{"token before role", good + " router", "f:1: the role is not allowed: want router or operator, then the token"},
		{"unknown role", "router " + good + "\nadmin " + good + "x", "f:2: the role is not allowed: want router or operator, then the token"},
		{"a short token", "router " + good[1:], "f:1: the token is not allowed: want 16 to 1024 visible ASCII characters"},
		{"a long token", "router " + strings.Repeat("a", 1025), "f:1: the token is not allowed: want 16 to 1024 visible ASCII characters"},
		{"a token with a non-ASCII character", "router " + good + "é", "f:1: the token is not allowed: want 16 to 1024 visible ASCII characters"},
		{"a token with both roles", "router " + good + "\n\noperator " + good, "f:3: the token is a duplicate of the one in line 1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := access.ParseTokens("f", []byte(tt.text))
			if (err == nil) != (got != nil) {
				t.Fatalf("got tokens %v and error %v, want exactly one", got, err)
			}
			if err == nil && tt.want != "" || err != nil && err.Error() != tt.want {
				t.Errorf("got  %v\nwant %s", err, tt.want)
			}
			if err != nil && strings.Contains(err.Error(), good[1:]) {
				t.Errorf("the error shows the token: %v", err)
			}
		})
	}
}

func TestParseCertificates(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, text, want string // the error; empty: none
	}{
		{"names", "router gateway\noperator spiffe://example.org/ops # not a comment", `f:2: the line is not allowed: want two words, ROLE NAME`},
		{"both roles", "# a comment\nrouter gateway\noperator spiffe://example.org/ops\n", ""},
		{"none", "\n", "f: no name found: want at least one line ROLE NAME with the role router or operator"},
		{"an unknown role", "admin gateway", "f:1: the role is not allowed: want router or operator, then the name"},
		{"twice", "router a\noperator a", `f:2: the name "a" is there twice`},
		{"a long name", "router " + strings.Repeat("a", 2049), "f:1: the name is not allowed: want at most 2048 bytes"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := access.ParseCertificates("f", []byte(tt.text))
			if (err == nil) != (got != nil) || err == nil && tt.want != "" || err != nil && err.Error() != tt.want {
				t.Errorf("got  %v\nwant %s", err, tt.want)
			}
		})
	}
}
