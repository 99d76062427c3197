package serve

import (
	"crypto/x509"
	"errors"
	"strings"

	"github.com/nats-io/nats.go"
)

// journalAdvice says which setting to change when a journal cannot be opened.
func journalAdvice(err error) string {
	var authority x509.UnknownAuthorityError
	var host x509.HostnameError
	switch {
	case errors.As(err, &authority):
		return "set the CA that has signed the NATS servers' certificates with --journal-tls-ca"
	case errors.As(err, &host):
		return "name the NATS servers in --journal as in their certificates"
	case strings.Contains(err.Error(), "tls error"), strings.Contains(err.Error(), "remote error: tls"): // a server closes the connection, or sends an alert, when it refuses the client's certificate
		return "set a client certificate that the NATS servers accept with --journal-tls-cert and --journal-tls-key"
	case errors.Is(err, nats.ErrPermissionViolation):
		return "permit it to the NATS user, or choose another user with --journal-credentials"
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthExpired), errors.Is(err, nats.ErrAuthRevoked):
		return "set valid credentials with --journal-credentials"
	default:
		return "choose another with --journal"
	}
}
