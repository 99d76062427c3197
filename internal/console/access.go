package console

import (
	"mime"
	"net"
	"net/http"
	"slices"
	"strings"

	"github.com/kvcast/kvcast/server"
)

// contentSecurityPolicy lets the page use its own files and this port only, never a script in its text, and never within
// another page. Trusted types refuse any text that would be parsed as HTML.
const contentSecurityPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

func setSecurityHeaders(h http.Header) {
	h.Set("Content-Security-Policy", contentSecurityPolicy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
}

// RefuseHost returns why a port refuses the header Host; empty: it does not. Where callers need no token, another site could otherwise
// make a name of its own resolve to the port's address, and read the answers as the port's own page does. A port on loopback is asked for as
// such; named reports whether another port may be asked for by any name.
func RefuseHost(host string, loopback, named bool) string {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = strings.Trim(host, "[]")
	}
	ip := net.ParseIP(name)
	switch {
	case strings.EqualFold(name, "localhost"), ip != nil && ip.IsLoopback():
		return ""
	case loopback:
		return "the admin port is on loopback: open it as localhost, 127.0.0.1 or [::1], not by another name"
	case ip == nil && !named:
		return "the page needs no token here, so it is not served by names, which other sites could take: open it by an IP address or as localhost, or set --auth-tokens"
	}
	return ""
}

// isJSON reports whether a request declares a body of JSON. No form of another site can, without a request for permission
// that is refused.
func isJSON(r *http.Request) bool {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	return err == nil && kind == "application/json"
}

// caller returns who calls.
func (c *Console) caller(r *http.Request) server.Caller {
	out := server.Caller{Address: clientAddress(r.RemoteAddr), TLS: r.TLS, Permitted: c.cfg.Loopback && !isForwarded(r)}
	if scheme, token, ok := strings.Cut(r.Header.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "bearer") {
		out.Token = token
	}
	return out
}

// isForwarded reports whether a proxy has forwarded a request: its client may be elsewhere.
func isForwarded(r *http.Request) bool {
	return slices.ContainsFunc([]string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-Ip", "Via"}, func(name string) bool {
		return len(r.Header.Values(name)) > 0
	})
}

// clientAddress is the address of a client, as text.
type clientAddress string

func (clientAddress) Network() string { return "tcp" }

func (a clientAddress) String() string { return string(a) }
