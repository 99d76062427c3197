package client

import (
	"fmt"
	"net/url"
	"strings"
)

// Object is data that is stored under a name.
type Object struct {
	Name string
	Data []byte
}

// Escape encodes any string, injectively, as letters, digits, hyphens, underscores and %XX: one token of a subject, and
// a header's value. The empty string becomes a lone %.
func Escape(s string) string {
	if s == "" {
		return "%"
	}
	var b strings.Builder
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_':
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// Unescape decodes what Escape has encoded.
func Unescape(s string) (string, error) {
	if s == "%" {
		return "", nil
	}
	return url.PathUnescape(s)
}
