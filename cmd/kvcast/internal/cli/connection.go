package cli

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpccredentials "google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// Connection is the flags of a command that calls a server.
type Connection struct {
	Addr      string `default:"localhost:50051" placeholder:"ADDR" help:"Server address (${default})."`
	TLS       bool   `name:"tls" help:"Use TLS with the system's CAs."`
	CA        string `name:"ca" placeholder:"FILE" predictor:"file" help:"Use TLS with the CAs in this PEM file only."`
	TokenFile string `placeholder:"FILE" predictor:"file" help:"File of the token to send ($KVCAST_TOKEN is the token itself)."`
}

// tokenVariable is the variable with the token of calls. There is no flag for it, since other users of the
// machine can see flags.
const tokenVariable = "KVCAST_TOKEN"

// ConnectionFlags returns the flags as they were given, each with a space before it.
func (c *Connection) ConnectionFlags() string {
	text := " --addr " + c.Addr
	if c.TLS {
		text += " --tls"
	}
	if c.CA != "" {
		text += " --ca " + c.CA
	}
	if c.TokenFile != "" {
		text += " --token-file " + c.TokenFile
	}
	return text
}

// Dial returns a connection, which its first call opens.
func (c *Connection) Dial(p Process) (*grpc.ClientConn, error) {
	options, err := c.DialOptions(p)
	if err != nil {
		return nil, err
	}
	conn, err := grpc.NewClient(c.Addr, options...)
	if err != nil {
		return nil, UsageError{fmt.Errorf("--addr: %q is not allowed: want HOST:PORT: %w", c.Addr, err)}
	}
	return conn, nil
}

// DialOptions returns what connections are made with.
func (c *Connection) DialOptions(p Process) ([]grpc.DialOption, error) {
	if _, port, err := net.SplitHostPort(c.Addr); err != nil || port == "" {
		return nil, UsageError{fmt.Errorf("--addr: %q is not allowed: want HOST:PORT, without a scheme", c.Addr)}
	}
	secured, err := c.transport()
	if err != nil {
		return nil, UsageError{err}
	}
	options := []grpc.DialOption{grpc.WithTransportCredentials(secured)}
	token, err := c.token(p)
	if err != nil {
		return nil, UsageError{err}
	}
	if token != "" {
		options = append(options, grpc.WithPerRPCCredentials(bearer(token)))
	}
	return options, nil
}

func (c *Connection) usesTLS() bool { return c.TLS || c.CA != "" }

func (c *Connection) transport() (grpccredentials.TransportCredentials, error) {
	if !c.usesTLS() {
		return insecure.NewCredentials(), nil
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.CA != "" {
		pem, err := os.ReadFile(c.CA)
		if err != nil {
			return nil, fmt.Errorf("--ca: %w", err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("--ca: %s has no certificate: want at least one, in PEM", c.CA)
		}
	}
	return grpccredentials.NewTLS(cfg), nil
}

// token returns the token to send; empty if there is none. Errors do not show it.
func (c *Connection) token(p Process) (string, error) {
	text, from := p.Getenv(tokenVariable), tokenVariable
	if c.TokenFile != "" {
		file, err := os.ReadFile(c.TokenFile)
		if err != nil {
			return "", fmt.Errorf("--token-file: %w", err)
		}
		if text, from = string(file), "--token-file: "+c.TokenFile; strings.TrimSpace(text) == "" {
			return "", fmt.Errorf("%s is empty: want a token", from)
		}
	}
	text = strings.TrimSpace(text)
	if strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", fmt.Errorf("%s is not a token: want visible ASCII characters alone", from)
	}
	return text, nil
}

// bearer is a token that every call carries, also without TLS, which a proxy beside the client may add.
type bearer string

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (bearer) RequireTransportSecurity() bool { return false }

// Error returns the error of a failed call as one line that says what to do. Other errors it returns as they are.
func (c *Connection) Error(err error) error {
	s, ok := status.FromError(err)
	switch {
	case !ok:
		return err
	case s.Code() == codes.Unavailable && len(s.Details()) == 0:
		return c.connectionError(s.Message())
	case s.Code() == codes.Unauthenticated:
		return fmt.Errorf("%s: %s (--token-file FILE, or the variable %s)", codeName(s.Code()), s.Message(), tokenVariable)
	}
	return fmt.Errorf("%s: %s", codeName(s.Code()), s.Message())
}

// connectionError explains why there is no connection. gRPC has the reason in its message only.
func (c *Connection) connectionError(message string) error {
	message = strings.TrimSuffix(message, `"`)
	_, certificate, isCertificate := strings.Cut(message, "x509: ")
	_, handshake, isHandshake := strings.Cut(message, "authentication handshake failed: ")
	switch {
	case strings.Contains(handshake, "first record does not look like a TLS handshake"):
		return fmt.Errorf("the server at %s does not use TLS; omit --tls and --ca", c.Addr)
	case isCertificate:
		certificate, _, _ = strings.Cut(certificate, " (")
		return fmt.Errorf("the certificate of the server at %s is not trusted: %s; give the file of its CA with --ca, and with --addr a name that is in the certificate", c.Addr, certificate)
	case isHandshake:
		return fmt.Errorf("TLS handshake with the server at %s: %s; omit --tls and --ca if it does not use TLS", c.Addr, handshake)
	case !c.usesTLS() && strings.Contains(message, "preface"):
		return fmt.Errorf("the server at %s closes the connection; if it uses TLS, add --tls or --ca FILE; if it is no kvcast server, give another with --addr", c.Addr)
	}
	cause := ""
	if _, dial, ok := strings.Cut(message, "dial tcp"); ok {
		cause = ": " + strings.Trim(dial[strings.LastIndex(dial, ": ")+1:], ` :"`)
	}
	return fmt.Errorf("no kvcast server at %s%s; start one with kvcast serve, or give another with --addr", c.Addr, cause)
}

// codeName returns a code as the contract writes it, such as OUT_OF_RANGE.
func codeName(c codes.Code) string {
	var b strings.Builder
	for i, r := range c.String() {
		if i > 0 && r >= 'A' && r <= 'Z' {
			b.WriteByte('_')
		}
		b.WriteRune(r)
	}
	return strings.ToUpper(b.String())
}
