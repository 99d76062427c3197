package main

import (
	"crypto/tls"
	"fmt"
	"os"

	"github.com/kvcast/kvcast/server"
)

// credentials are what the server shows its clients, and what it asks of them.
type credentials struct {
	tls    *tls.Config    // nil: connections are not secured
	tokens *server.Tokens // nil: all may call
}

// credentials reads the files that the configuration names. They are read once:
// who replaces them starts the server anew.
func (c config) credentials() (creds credentials, err error) {
	if c.Auth.Tokens != "" {
		text, err := os.ReadFile(c.Auth.Tokens)
		if err != nil {
			return credentials{}, fmt.Errorf("auth.tokens: %w", err)
		}
		if creds.tokens, err = server.ParseTokens(c.Auth.Tokens, text); err != nil {
			return credentials{}, fmt.Errorf("auth.tokens: %w", err)
		}
	}
	if c.TLS.Cert == "" {
		return creds, nil
	}
	cert, err := os.ReadFile(c.TLS.Cert)
	if err != nil {
		return credentials{}, fmt.Errorf("tls.cert: %w", err)
	}
	key, err := os.ReadFile(c.TLS.Key)
	if err != nil {
		return credentials{}, fmt.Errorf("tls.key: %w", err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return credentials{}, fmt.Errorf("tls.cert %s with tls.key %s: %w; want a certificate and its key, each in PEM", c.TLS.Cert, c.TLS.Key, err)
	}
	creds.tls = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	return creds, nil
}
