// Package config is the configuration of kvcast serve.
//
// A YAML file, KVCAST_ variables and flags flow in, each over the one before. A Config flows out, made of the
// configuration of each part, or an error that names every mistake with its origin (file and line, variable or flag) and
// what is allowed. A Config does not change after Read.
//
// Each setting is declared once, in fields.go: its key, field, default, bounds and help. The file's form, the variables,
// the flags, their help and what Write prints follow from that.
package config

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"time"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/discovery"
	"github.com/kvcast/kvcast/journal"
	"github.com/kvcast/kvcast/pipeline"
	"github.com/kvcast/kvcast/server"
)

// Config is the configuration of a server. What a part reads is in that part's own Config.
type Config struct {
	Listen   string // address of the gRPC port
	Admin    string // address of the admin port; empty: none
	LogLevel slog.Level

	JournalKind string
	Journal     journal.Config
	Pipeline    pipeline.Config
	Ingest      ingestconfig.Config
	Discovery   []Discovery
	Server      server.Config

	// MaxBlocks and MaxAttributeBytes are the budgets of all workers together.
	MaxBlocks         int
	MaxAttributeBytes int64
	// StartWait is how long routers are kept waiting at the start for engines that cannot be reached.
	StartWait time.Duration

	// RegisterHosts is the text of Server.RegisterHosts.
	RegisterHosts string
	// TokensFile, CertFile and KeyFile are read by LoadCredentials; empty: none.
	TokensFile, CertFile, KeyFile string
}

// Discovery is where workers are found: by a DNS name, or in a file if File is set.
type Discovery struct {
	DNS      discovery.DNS
	File     string
	Interval time.Duration
}

// DefaultBind is the endpoint of the listener that a server has if nothing else to read from is configured.
const DefaultBind = "tcp://*:5557"

// newConfig returns the configuration in which every setting has its default.
func newConfig() *Config {
	c := new(Config)
	setDefaults(c.fields())
	return c
}

// ReadsNothing reports whether no workers, listeners or discovery are configured.
func (c *Config) ReadsNothing() bool {
	return len(c.Ingest.Workers)+len(c.Ingest.Listeners)+len(c.Discovery) == 0
}

// LoadCredentials reads the files of tokens, certificate and key into the server's configuration. They are read once:
// to replace them, restart the server.
func (c *Config) LoadCredentials() error {
	if c.TokensFile != "" {
		text, err := os.ReadFile(c.TokensFile)
		if err != nil {
			return fmt.Errorf("auth.tokens: %w", err)
		}
		if c.Server.Tokens, err = server.ParseTokens(c.TokensFile, text); err != nil {
			return fmt.Errorf("auth.tokens: %w", err)
		}
	}
	if c.CertFile == "" {
		return nil
	}
	cert, err := os.ReadFile(c.CertFile)
	if err != nil {
		return fmt.Errorf("tls.cert: %w", err)
	}
	key, err := os.ReadFile(c.KeyFile)
	if err != nil {
		return fmt.Errorf("tls.key: %w", err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return fmt.Errorf("tls.cert %s with tls.key %s: %w; want a certificate and its key, each in PEM", c.CertFile, c.KeyFile, err)
	}
	c.Server.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	return nil
}
