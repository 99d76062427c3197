package client

import "net/url"

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
	const digits = "0123456789ABCDEF"
	b := make([]byte, 0, 2*len(s))
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_':
			b = append(b, c)
		default:
			b = append(b, '%', digits[c>>4], digits[c&0xf])
		}
	}
	return string(b)
}

// Unescape decodes what Escape has encoded.
func Unescape(s string) (string, error) {
	if s == "%" {
		return "", nil
	}
	return url.PathUnescape(s)
}
