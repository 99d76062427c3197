package cli

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpccredentials "google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"
)

// Connection contains the flags of a command that calls a server.
type Connection struct {
	Addr      string `default:"localhost:50051" placeholder:"ADDR" help:"Server address, or several that are tried in turn, separated by commas (${default})."`
	TLS       bool   `name:"tls" help:"Use TLS with the system's CAs."`
	CA        string `name:"ca" placeholder:"FILE" predictor:"file" help:"Use TLS with the CAs in this PEM file only."`
	Cert      string `placeholder:"FILE" predictor:"file" help:"Client certificate in PEM, for servers that require one; with --key."`
	Key       string `placeholder:"FILE" predictor:"file" help:"Key of the client certificate in PEM."`
	TokenFile string `placeholder:"FILE" predictor:"file" help:"File of the token to send ($KVCAST_TOKEN is the token itself)."`
}

// TokenVariable is the environment variable with the token that calls send. A flag would be visible to other users of the machine.
const TokenVariable = "KVCAST_TOKEN"

// ConnectionFlags returns the flags as on a command line, each after a space.
func (c *Connection) ConnectionFlags() string {
	text := " --addr " + c.Addr
	if c.TLS {
		text += " --tls"
	}
	if c.CA != "" {
		text += " --ca " + c.CA
	}
	if c.Cert != "" {
		text += " --cert " + c.Cert + " --key " + c.Key
	}
	if c.TokenFile != "" {
		text += " --token-file " + c.TokenFile
	}
	return text
}

// Servers returns the addresses of --addr, at least one.
func (c *Connection) Servers() []string { return strings.Split(c.Addr, ",") }

// Dial returns a connection to the first of the servers that can be reached. Its first call connects.
func (c *Connection) Dial(p Process) (*grpc.ClientConn, error) {
	options, err := c.DialOptions(p)
	if err != nil {
		return nil, err
	}
	target := c.Addr
	if servers := c.Servers(); len(servers) > 1 {
		list := manual.NewBuilderWithScheme("servers")
		var state resolver.State
		for _, addr := range servers {
			host, _, _ := net.SplitHostPort(addr) // DialOptions has checked it
			state.Addresses = append(state.Addresses, resolver.Address{Addr: addr, ServerName: host})
		}
		list.InitialState(state)
		options, target = append(options, grpc.WithResolvers(list)), list.Scheme()+":///"
	}
	conn, err := grpc.NewClient(target, options...)
	if err != nil {
		return nil, UsageError{fmt.Errorf("--addr: %q is not allowed: want HOST:PORT: %w", c.Addr, err)}
	}
	return conn, nil
}

// DialOptions returns the options of connections: TLS and the token.
func (c *Connection) DialOptions(p Process) ([]grpc.DialOption, error) {
	for _, addr := range c.Servers() {
		if _, port, err := net.SplitHostPort(addr); err != nil || port == "" {
			return nil, UsageError{fmt.Errorf("--addr: %q is not allowed: want HOST:PORT, without a scheme, or several separated by commas", addr)}
		}
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
	switch {
	case (c.Cert == "") != (c.Key == ""):
		return nil, errors.New("--cert and --key: want both or neither")
	case !c.usesTLS() && c.Cert != "":
		return nil, errors.New("--cert: want --tls or --ca as well")
	case !c.usesTLS():
		return insecure.NewCredentials(), nil
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.Cert != "" {
		pair, err := tls.LoadX509KeyPair(c.Cert, c.Key)
		if err != nil {
			return nil, fmt.Errorf("--cert %s with --key %s: %w; want a certificate and its key, each in PEM", c.Cert, c.Key, err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
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

// token returns the token to send; empty if none is given. Errors do not contain the token.
func (c *Connection) token(p Process) (string, error) {
	text, from := p.Getenv(TokenVariable), TokenVariable
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

// bearer is a token that every call sends, also without TLS: a proxy beside the client may add TLS.
type bearer string

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

func (bearer) RequireTransportSecurity() bool { return false }

// Error returns the gRPC error of a failed call as one line that says what to do. It returns any other error unchanged.
func (c *Connection) Error(err error) error {
	s, ok := status.FromError(err)
	switch {
	case !ok:
		return err
	case s.Code() == codes.Unavailable && len(s.Details()) == 0:
		return c.connectionError(s.Message())
	case s.Code() == codes.Unauthenticated:
		return fmt.Errorf("%s: %s (--token-file FILE, or the variable %s)", code.Code(s.Code()), s.Message(), TokenVariable)
	}
	return fmt.Errorf("%s: %s", code.Code(s.Code()), s.Message())
}

// isClosedAfterHandshake reports whether a server has refused the client's certificate. With TLS 1.3 it does so after the
// client's handshake, and the client may notice the alert or the closed connection first.
func isClosedAfterHandshake(message string) bool {
	for _, part := range []string{"remote error: tls: ", "broken pipe", "connection reset by peer"} {
		if strings.Contains(message, part) {
			return true
		}
	}
	return false
}

// connectionError returns why a connection failed. Only the message of the gRPC error has the reason.
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
	case c.usesTLS() && isClosedAfterHandshake(message):
		return fmt.Errorf("the server at %s closes the connection after the TLS handshake: it requires another client certificate, or one at all; give it with --cert and --key", c.Addr)
	case isHandshake:
		return fmt.Errorf("TLS handshake with the server at %s: %s; omit --tls and --ca if it does not use TLS", c.Addr, handshake)
	case !c.usesTLS() && strings.Contains(message, "preface"):
		return fmt.Errorf("the server at %s closes the connection; if it uses TLS, add --tls or --ca FILE; if it is no kvcast server, give another with --addr", c.Addr)
	case strings.Contains(message, "error reading from server"):
		return errors.New("the connection to the server is lost")
	}
	cause := ""
	if _, dial, ok := strings.Cut(message, "dial tcp"); ok {
		cause = ": " + strings.Trim(dial[strings.LastIndex(dial, ": ")+1:], ` :"`)
	}
	return fmt.Errorf("no kvcast server at %s%s; start one with kvcast serve, or give another with --addr", c.Addr, cause)
}
