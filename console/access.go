package console

import (
	"mime"
	"net"
	"net/http"
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

// isLoopbackHost reports whether the header Host names this machine: localhost or a loopback address, with any port.
func isLoopbackHost(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = strings.Trim(host, "[]")
	}
	ip := net.ParseIP(name)
	return strings.EqualFold(name, "localhost") || ip != nil && ip.IsLoopback()
}

// isJSON reports whether a request declares a body of JSON. No form of another site can, without a request for permission
// that is refused.
func isJSON(r *http.Request) bool {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	return err == nil && kind == "application/json"
}

// caller returns who calls.
func (c *Console) caller(r *http.Request) server.Caller {
	out := server.Caller{Address: clientAddress(r.RemoteAddr), TLS: r.TLS, Permitted: c.cfg.Loopback}
	if scheme, token, ok := strings.Cut(r.Header.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "bearer") {
		out.Token = token
	}
	return out
}

// clientAddress is the address of a client, as text.
type clientAddress string

// Network implements net.Addr.
func (clientAddress) Network() string { return "tcp" }

// String implements net.Addr.
func (a clientAddress) String() string { return string(a) }
