// Package config is the configuration of kvcast serve.
//
// A YAML file, KVCAST_ variables and flags flow in; variables override the file, and flags override both. A Config flows
// out, or an error that lists every mistake with its origin (file and line, variable or flag) and the allowed values. A
// Config does not change after Read.
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
	"github.com/kvcast/kvcast/pipeline"
	"github.com/kvcast/kvcast/server"
)

// Config is the configuration of a server. It contains the Config of each package that kvcast serve wires.
type Config struct {
	Listen   string // address of the gRPC port
	Admin    string // address of the admin port; empty: none
	LogLevel slog.Level
	// LogFormat is the form of log lines.
	LogFormat LogFormat
	// TracingEndpoint is the URL of an OpenTelemetry collector; empty: no tracing. TracingRatio is the part of the calls that
	// are traced, from 0 to 1.
	TracingEndpoint string
	TracingRatio    float64

	Journal Journal
	// IngestsEngines reports whether the server reads engines. If not, another server writes the journal.
	IngestsEngines bool
	// ClusterTTL is how long an instance without a heartbeat is held for live.
	ClusterTTL time.Duration

	Pipeline  pipeline.Config
	Ingest    ingestconfig.Config
	Discovery []Discovery
	Server    server.Config

	// MaxBlocks and MaxAttributeBytes are limits for all workers together.
	MaxBlocks         int
	MaxAttributeBytes int64
	// StartWait is how long the server waits at start for unreachable engines before it serves routers.
	StartWait time.Duration

	// RegisterHosts is Server.RegisterHosts as text.
	RegisterHosts string
	// TokensFile, CertFile and KeyFile are read by LoadCredentials; empty: none.
	TokensFile, CertFile, KeyFile string
}

// LogFormat is the form of log lines.
type LogFormat string

// The forms.
const (
	LogText LogFormat = "text" // key=value pairs
	LogJSON LogFormat = "json" // an object a line
)

// Discovery finds workers by a DNS name, among pods, or in a file. Exactly one of DNS, Kubernetes.Selector and File is set.
type Discovery struct {
	DNS        string // a host
	Kubernetes Kubernetes
	File       string
	// Engines is for DNS and Kubernetes.
	Engines  discovery.Engines
	Interval time.Duration // for DNS and File
}

// Kubernetes finds workers among the pods of namespaces.
type Kubernetes struct {
	Selector         string
	Namespaces       []string // kubernetes.AllNamespaces for all; none for that of Kubeconfig
	Kubeconfig       string
	HTTPPort, DPSize int
	Labels           []string
}

// DefaultBind is the endpoint of the listener of a server without a file, workers, listeners and discovery.
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

// LoadCredentials reads the files of tokens, certificate and key into the server's configuration. Changes of the files
// take effect at the next start.
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
	pair, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
	if err != nil {
		return fmt.Errorf("tls.cert %s with tls.key %s: %w; want a certificate and its key, each in PEM", c.CertFile, c.KeyFile, err)
	}
	c.Server.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	return nil
}
