package engineclient

import (
	"cmp"
	"fmt"
	"log/slog"
	"math"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest/config"
)

// Defaults and limits of a Config. Package config has the others.
const (
	// DefaultPubPort is the port of vLLM's PUB socket.
	DefaultPubPort = 5557
	// DefaultBuffer is how many events may wait for the handler.
	DefaultBuffer = 1000
	// DefaultPollInterval is how often Connect, WaitConnected and Reconnect check the connection.
	DefaultPollInterval = 100 * time.Millisecond
	// DefaultReconnectMax is the maximum backoff between attempts to connect.
	DefaultReconnectMax = 30 * time.Second
	// MaxBuffer is the largest Config.Buffer.
	MaxBuffer = 1_000_000
)

// Config configures a Client. Host or Connect is required; the zero value of every other field means its default.
type Config struct {
	// Worker names the engine in events, logs and metrics: 1 to config.MaxNameBytes bytes. The
	// default is the host and port, or the path of the socket.
	Worker string
	// Model is at most config.MaxModelBytes bytes; empty means unknown.
	Model string
	// BlockSize is in tokens, at most 65,536; 0 means the block size of the first store.
	BlockSize uint32
	// Engine defaults to EngineVLLM.
	Engine Engine

	// Host is a host name, an IPv4 address, or an IPv6 address with or without brackets. A name is resolved again for each new connection.
	Host string
	// PubPort is the port of the engine's PUB socket. The default is DefaultPubPort.
	PubPort int
	// ReplayPort is the port of its replay socket. The default is config.DefaultReplayPort. A
	// negative value means that there is none: lost batches are then reported as gaps.
	ReplayPort int
	// Connect is the endpoint of the PUB socket, tcp://HOST:PORT or ipc://PATH, instead of Host and
	// the ports. Replay is the endpoint of the replay socket; empty means that there is none.
	Connect string
	Replay  string
	// Topic is the prefix of the topics to read; empty means all topics.
	Topic string

	// ReplayTimeout is the maximum time until a reply of the replay socket arrives: 10 ms to 1 h. The default is config.DefaultReplayTimeout.
	ReplayTimeout time.Duration
	// ReconnectMin and ReconnectMax are the minimum and maximum backoff between attempts to connect,
	// which doubles. The defaults are config.DefaultReconnectMin and DefaultReconnectMax.
	ReconnectMin time.Duration
	ReconnectMax time.Duration
	// Silence is how long a connection may be silent before it is verified. The default is
	// config.DefaultSilence; a negative value disables the check.
	Silence time.Duration
	// PollInterval is how often Connect, WaitConnected and Reconnect check the connection: 1 ms to
	// 1 min. The default is DefaultPollInterval. Events are not polled for.
	PollInterval time.Duration
	// Buffer is how many events may wait for the handler, at most MaxBuffer. The default is DefaultBuffer. While the buffer is full nothing is
	// read. Messages that ZeroMQ then drops are requested from the replay socket, or reported as a gap if there is none.
	Buffer int

	// Metrics has the metrics registered while the Client runs; nil means that they are not registered. The metrics of package ingest get the
	// label client with the value of Worker, so that many Clients can share a Registerer. An Ingest needs another Registerer.
	Metrics prometheus.Registerer
	// Logger is optional. Its level is ignored: LogLevel is used instead.
	Logger *slog.Logger
	// LogLevel is the lowest level that is logged, until SetLogLevel is called.
	LogLevel slog.Level
}

// DefaultConfig returns the Config of an engine at a host, with all defaults set.
func DefaultConfig(worker, host, model string) Config {
	return Config{Worker: worker, Host: host, Model: model}.withDefaults()
}

// withDefaults returns the Config with defaults in place of zero fields.
func (c Config) withDefaults() Config {
	c.Engine = cmp.Or(c.Engine, EngineVLLM)
	if c.Connect == "" {
		c.PubPort = cmp.Or(c.PubPort, DefaultPubPort)
		c.ReplayPort = cmp.Or(c.ReplayPort, config.DefaultReplayPort)
	}
	c.ReplayTimeout = cmp.Or(c.ReplayTimeout, config.DefaultReplayTimeout)
	c.ReconnectMin = cmp.Or(c.ReconnectMin, config.DefaultReconnectMin)
	c.ReconnectMax = cmp.Or(c.ReconnectMax, max(DefaultReconnectMax, c.ReconnectMin))
	c.Silence = cmp.Or(c.Silence, config.DefaultSilence)
	c.PollInterval = cmp.Or(c.PollInterval, DefaultPollInterval)
	c.Buffer = cmp.Or(c.Buffer, DefaultBuffer)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Worker == "" {
		c.Worker = c.connect()
		if _, address, ok := strings.Cut(c.Worker, "://"); ok {
			c.Worker = address
		}
	}
	return c
}

// connect returns the endpoint of the PUB socket; empty if neither Host nor Connect is set.
func (c Config) connect() string {
	if c.Connect != "" || c.Host == "" {
		return c.Connect
	}
	return tcpEndpoint(c.Host, c.PubPort)
}

// replay returns the endpoint of the replay socket; empty if there is none.
func (c Config) replay() string {
	if c.Connect != "" || c.Host == "" || c.ReplayPort < 0 {
		return c.Replay
	}
	return tcpEndpoint(c.Host, c.ReplayPort)
}

func tcpEndpoint(host string, port int) string {
	return "tcp://" + net.JoinHostPort(unbracketed(host), strconv.Itoa(port))
}

func unbracketed(host string) string {
	if inner, ok := strings.CutPrefix(host, "["); ok && strings.HasSuffix(inner, "]") {
		return strings.TrimSuffix(inner, "]")
	}
	return host
}

// ingest returns the config of package ingest. Its grace time is so long that the worker is never removed.
func (c Config) ingest() config.Config {
	return config.Config{
		Workers: []config.Worker{{
			Name:      c.Worker,
			Model:     c.Model,
			BlockSize: c.BlockSize,
			Sources:   []config.Source{{Engine: c.Engine, Connect: c.connect(), Replay: c.replay(), Topic: c.Topic}},
		}},
		ReplayTimeout: c.ReplayTimeout,
		Silence:       c.Silence,
		Grace:         math.MaxInt64,
		ReconnectMin:  c.ReconnectMin,
		ReconnectMax:  c.ReconnectMax,
		Logger:        c.Logger,
	}
}

const (
	allowedHost = "a host name, an IPv4 address, or an IPv6 address, without a port"
	allowedPort = "1 to 65535"
)

// Validate returns nil, or a FieldError for each invalid field, joined.
func (c Config) Validate() error {
	var v config.Validation
	given := c
	c = c.withDefaults()
	if given.Worker != "" || given.Connect != "" {
		v.Name("Worker", c.Worker)
	}
	v.Check(config.ValidModel(c.Model), "Model", c.Model, config.AllowedModel)
	v.Check(c.Engine.Known(), "Engine", string(c.Engine), config.AllowedEngines)
	if given.Connect != "" {
		checkEndpoints(&v, given)
	} else {
		v.Check(validHost(c.Host), "Host", c.Host, allowedHost)
		v.Check(c.PubPort >= 1 && c.PubPort <= config.MaxPort, "PubPort", c.PubPort, allowedPort)
		v.Check(c.ReplayPort <= config.MaxPort, "ReplayPort", c.ReplayPort, allowedPort+", or negative for none")
		v.Check(c.ReplayPort != c.PubPort, "ReplayPort", c.ReplayPort, "another port than PubPort")
		v.Check(given.Replay == "", "Replay", given.Replay, "empty unless Connect is set")
	}
	v.Check(len(c.Topic) <= config.MaxTopicBytes && config.Printable(c.Topic), "Topic", c.Topic,
		fmt.Sprintf("at most %d bytes of UTF-8 without control or format characters", config.MaxTopicBytes))
	v.Durations(c.ingest())
	v.Check(c.PollInterval >= time.Millisecond && c.PollInterval <= time.Minute,
		"PollInterval", c.PollInterval, "1 ms to 1 min")
	v.Check(c.Buffer >= 1 && c.Buffer <= MaxBuffer, "Buffer", c.Buffer, fmt.Sprintf("1 to %d", MaxBuffer))
	return v.Err()
}

// checkEndpoints checks Connect and Replay, and that Host and the ports are not set.
func checkEndpoints(v *config.Validation, given Config) {
	const unused = " where Connect is set"
	v.Check(given.Host == "", "Host", given.Host, "empty"+unused)
	v.Check(given.PubPort == 0, "PubPort", given.PubPort, "0"+unused)
	v.Check(given.ReplayPort == 0, "ReplayPort", given.ReplayPort, "0"+unused)
	checkEndpoint(v, "Connect", given.Connect)
	if given.Replay != "" {
		checkEndpoint(v, "Replay", given.Replay)
		v.Check(given.Replay != given.Connect, "Replay", given.Replay, "another endpoint than Connect")
	}
}

func checkEndpoint(v *config.Validation, field, value string) {
	e, ok := config.ParseEndpoint(value, false)
	v.Check(ok, field, value, config.AllowedConnect)
	if ok && e.Transport == config.TransportTCP {
		v.Check(validHost(e.Address), field, value, "tcp://HOST:PORT where HOST is "+allowedHost)
	}
}

// validHost reports whether a host is valid. An IPv6 address may have brackets.
func validHost(host string) bool {
	inner := unbracketed(host)
	return config.ValidHost(inner) && (inner == host || strings.Contains(inner, ":"))
}
