package main

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

	"github.com/kvcast/kvcast/client"
)

// connectionFlags say where a server is, and how it is called.
type connectionFlags struct {
	Addr      string `default:"localhost:50051" placeholder:"ADDR" help:"The server (${default})."`
	TLS       bool   `name:"tls" help:"Call it with TLS, trusting the CAs that this machine trusts."`
	CA        string `name:"ca" placeholder:"FILE" predictor:"file" help:"Call it with TLS, trusting only the CAs in this file: PEM."`
	TokenFile string `placeholder:"FILE" predictor:"file" help:"Send the token that is in this file. Without: that in the variable KVCAST_TOKEN."`
}

// tokenVariable has the token that calls carry. There is no flag for it: others on
// the machine see those.
const tokenVariable = "KVCAST_TOKEN"

// callFlags writes the flags as they would be given again.
func (c *connectionFlags) callFlags() string {
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

// dial makes a connection that is opened by its first call.
func (c *connectionFlags) dial() (*grpc.ClientConn, error) {
	options, err := c.options()
	if err != nil {
		return nil, err
	}
	conn, err := grpc.NewClient(c.Addr, options...)
	if err != nil {
		return nil, usageError{fmt.Errorf("--addr: %q is not allowed: want HOST:PORT: %w", c.Addr, err)}
	}
	return conn, nil
}

// subscriber makes a client that connects anew as often as it has to.
func (c *connectionFlags) subscriber() (*client.Client, error) {
	options, err := c.options()
	if err != nil {
		return nil, err
	}
	s, err := client.New(c.Addr, options...)
	if err != nil {
		return nil, usageError{fmt.Errorf("--addr: %q is not allowed: want HOST:PORT: %w", c.Addr, err)}
	}
	return s, nil
}

// options are what connections are made with.
func (c *connectionFlags) options() ([]grpc.DialOption, error) {
	if _, port, err := net.SplitHostPort(c.Addr); err != nil || port == "" {
		return nil, usageError{fmt.Errorf("--addr: %q is not allowed: want HOST:PORT, without a scheme", c.Addr)}
	}
	options := make([]grpc.DialOption, 0, 2)
	secured, err := c.transport()
	if err != nil {
		return nil, usageError{err}
	}
	options = append(options, grpc.WithTransportCredentials(secured))
	token, err := c.token()
	if err != nil {
		return nil, usageError{err}
	}
	if token != "" {
		options = append(options, grpc.WithPerRPCCredentials(bearer(token)))
	}
	return options, nil
}

func (c *connectionFlags) secured() bool { return c.TLS || c.CA != "" }

func (c *connectionFlags) transport() (grpccredentials.TransportCredentials, error) {
	if !c.secured() {
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
			return nil, fmt.Errorf("--ca: no certificate is in %s: want one at least, in PEM", c.CA)
		}
	}
	return grpccredentials.NewTLS(cfg), nil
}

// token returns the token to send, or nothing. An error does not show it.
func (c *connectionFlags) token() (string, error) {
	text, from := os.Getenv(tokenVariable), tokenVariable
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
		return "", fmt.Errorf("%s is not a token: want one by itself, of visible ASCII characters", from)
	}
	return text, nil
}

// bearer is a token that every call carries. It is sent without TLS as well:
// something beside the client may be what does TLS.
type bearer string

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (bearer) RequireTransportSecurity() bool { return false }

// callError makes one line of a failed call that says what to do. An error that
// is not of the call stays as it is.
func (c *connectionFlags) callError(err error) error {
	s, ok := status.FromError(err)
	switch {
	case !ok:
		return err
	case s.Code() == codes.Unavailable && len(s.Details()) == 0:
		return c.connectionError(s.Message())
	case s.Code() == codes.Unauthenticated && !c.sendsToken():
		return fmt.Errorf("%s: %s (--token-file FILE, or the variable %s)", codeName(s.Code()), s.Message(), tokenVariable)
	}
	return fmt.Errorf("%s: %s", codeName(s.Code()), s.Message())
}

func (c *connectionFlags) sendsToken() bool {
	token, err := c.token()
	return err == nil && token != ""
}

// connectionError finds in gRPC's message why there is no connection.
func (c *connectionFlags) connectionError(message string) error {
	message = strings.TrimSuffix(message, `"`)
	_, untrusted, x509 := strings.Cut(message, "x509: ")
	_, handshake, failed := strings.Cut(message, "authentication handshake failed: ")
	switch {
	case strings.Contains(handshake, "first record does not look like a TLS handshake"):
		return fmt.Errorf("the server at %s does not speak TLS; leave out --tls and --ca", c.Addr)
	case x509:
		untrusted, _, _ = strings.Cut(untrusted, " (")
		return fmt.Errorf("the server at %s is not to be trusted: %s; name the file of its CA with --ca, and with --addr a name that its certificate has", c.Addr, untrusted)
	case failed:
		return fmt.Errorf("no TLS with the server at %s: %s; leave out --tls and --ca if it does not speak TLS", c.Addr, handshake)
	case !c.secured() && strings.Contains(message, "preface"):
		return fmt.Errorf("the server at %s hangs up; if it wants TLS, add --tls, or --ca FILE; if it is no kvcast server, name one with --addr", c.Addr)
	}
	return fmt.Errorf("no kvcast server answers at %s%s; start one with kvcast serve, or name another with --addr", c.Addr, dialCause(message))
}

// dialCause finds in gRPC's message why no connection was made; the rest of it
// says no more.
func dialCause(message string) string {
	_, cause, ok := strings.Cut(message, "dial tcp")
	if !ok {
		return ""
	}
	if i := strings.LastIndex(cause, ": "); i >= 0 {
		cause = cause[i+2:]
	}
	return ": " + strings.Trim(cause, ` "`)
}

// codeName writes a code as the contract does.
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
