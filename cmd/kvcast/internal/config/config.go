// Package config is the configuration of kvcast serve.
//
// A YAML file, KVCAST_ variables and flags flow in; variables override the file, and flags override both. A Config flows out, or an error
// that lists every mistake with its origin (file and line, variable or flag) and the allowed values. A Config does not change after Read.
//
// Each setting is declared once, in fields.go: its key, field, default, bounds and help. The file's form, the variables,
// the flags, their help and what Write prints follow from that.
package config

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"time"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/discovery"
	"github.com/kvcast/kvcast/pipeline"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/server/access"
)

// Config is the configuration of a server. It contains the Config of each package that kvcast serve wires.
type Config struct {
	Listen   string // address of the gRPC port
	Admin    string // address of the admin port; empty: none
	AdminTLS bool   // whether the admin port uses the certificate of the gRPC port
	Console  bool   // whether the admin port serves the console
	LogLevel slog.Level
	// LogFormat is the form of log lines.
	LogFormat LogFormat
	Tracing   Tracing

	Journal Journal
	Cluster Cluster

	Pipeline  pipeline.Config
	Ingest    ingestconfig.Config
	Discovery []Discovery
	Server    server.Config
	Egress    Egress

	// RetainTokenIDs keeps token ids in the index, in at most TokenIDBytes.
	RetainTokenIDs bool
	TokenIDBytes   int64
	// RetainBlockHashes keeps what matches with block hashes need.
	RetainBlockHashes bool

	// MaxBlocks and MaxAttributeBytes are limits for all workers together.
	MaxBlocks         int
	MaxAttributeBytes int64
	// StartWait is how long the server waits at start for unreachable engines before it serves routers.
	StartWait time.Duration
	// DiscoveryWait is how long the server waits at start for the first success of each discovery before it serves routers.
	DiscoveryWait time.Duration

	// Reflection is the contrary of Server.NoReflection.
	Reflection bool
	// RegisterHosts are the hosts that RegisterWorker accepts in endpoints, also as text.
	RegisterHosts     ingestconfig.Hosts
	RegisterHostsText string
	CredentialFiles
}

// Tracing is where spans of calls are sent.
type Tracing struct {
	Endpoint    string  // URL of an OpenTelemetry collector; empty: no tracing
	SampleRatio float64 // the part of the calls that are traced, from 0 to 1
}

// Cluster is what the server does among those with the same journal.
type Cluster struct {
	Ingest bool          // whether it reads engines; if not, another server writes the journal
	Serve  bool          // whether it serves routers; if not, others do
	Name   string        // of the server in the status of all servers; empty: the host's name
	TTL    time.Duration // how long an instance without a heartbeat is held for live
}

// LogFormat is the form of log lines.
type LogFormat string

// The forms.
const (
	LogText LogFormat = "text" // key=value pairs
	LogJSON LogFormat = "json" // an object a line
)

// Discovery finds workers by a DNS name, among pods, or in a file. Exactly one of DNS, Kubernetes.Selector, Kubernetes.Pool and File is set.
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
	Pool             string   // name of an InferencePool of each namespace
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

// CredentialFiles are the files of tokens, client certificates and TLS; empty: none.
type CredentialFiles struct {
	TokensFile, CertificatesFile, CertFile, KeyFile, ClientCAFile string
}

// Names returns the names of the files that LoadCredentials reads.
func (c *CredentialFiles) Names() []string {
	all := []string{c.TokensFile, c.CertificatesFile, c.CertFile, c.KeyFile, c.ClientCAFile}
	return slices.DeleteFunc(all, func(name string) bool { return name == "" })
}

// Credentials are what the files of tokens, client certificates and TLS have.
type Credentials struct {
	Access access.List
	TLS    *tls.Config // nil: no TLS
}

// LoadCredentials reads the files of tokens, client certificates and TLS.
func (c *CredentialFiles) LoadCredentials() (Credentials, error) {
	var loaded Credentials
	if c.TokensFile != "" {
		text, err := os.ReadFile(c.TokensFile)
		if err == nil {
			loaded.Access.Tokens, err = access.ParseTokens(c.TokensFile, text)
		}
		if err != nil {
			return Credentials{}, fmt.Errorf("auth.tokens: %w", err)
		}
	}
	if c.CertificatesFile != "" {
		text, err := os.ReadFile(c.CertificatesFile)
		if err == nil {
			loaded.Access.Certificates, err = access.ParseCertificates(c.CertificatesFile, text)
		}
		if err != nil {
			return Credentials{}, fmt.Errorf("auth.certificates: %w", err)
		}
	}
	if c.CertFile == "" {
		return loaded, nil
	}
	pair, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
	if err != nil {
		return Credentials{}, fmt.Errorf("tls.cert %s with tls.key %s: %w; want a certificate and its key, each in PEM", c.CertFile, c.KeyFile, err)
	}
	loaded.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"}}
	if c.ClientCAFile == "" {
		return loaded, nil
	}
	pem, err := os.ReadFile(c.ClientCAFile)
	if err != nil {
		return Credentials{}, fmt.Errorf("tls.client_ca: %w", err)
	}
	loaded.TLS.ClientCAs = x509.NewCertPool()
	if !loaded.TLS.ClientCAs.AppendCertsFromPEM(pem) {
		return Credentials{}, fmt.Errorf("tls.client_ca: %s has no certificate: want at least one, in PEM", c.ClientCAFile)
	}
	loaded.TLS.ClientAuth = tls.RequireAndVerifyClientCert
	if c.TokensFile != "" {
		loaded.TLS.ClientAuth = tls.VerifyClientCertIfGiven
	}
	return loaded, nil
}
