package engineclient

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/config"
)

// Defaults and limits of a Config, beside those of package config.
const (
	// DefaultPubPort is the port where an engine publishes: vLLM's.
	DefaultPubPort = 5557
	// DefaultBuffer is how many events may wait for the handler.
	DefaultBuffer = 1000
	// DefaultPollInterval is how often Connect, WaitConnected and Reconnect check the
	// connection.
	DefaultPollInterval = 100 * time.Millisecond
	// MaxBuffer is the largest Config.Buffer.
	MaxBuffer = 1_000_000
)

// Config is the engine that a Client reads. Host or Connect is required; the zero value of
// every other field means its default.
type Config struct {
	// Worker names the engine in events, logs and metrics: 1 to config.MaxNameBytes bytes;
	// the host and port, or the path of the socket, unless set.
	Worker string
	// Model is at most config.MaxModelBytes bytes; empty means unknown.
	Model string
	// BlockSize is in tokens; 0 means that it is learned from the first store.
	BlockSize uint32
	// Engine is feed.EngineVLLM unless set.
	Engine feed.Engine

	// Host is a host name, an IPv4 address, or an IPv6 address with or without
	// brackets. A name is looked up again for each new connection.
	Host string
	// PubPort is the port of the engine's PUB socket: DefaultPubPort unless set.
	PubPort int
	// ReplayPort is the port of its replay socket: config.DefaultReplayPort unless set;
	// negative means that there is none, so that lost batches are reported as gaps.
	ReplayPort int
	// Connect is the endpoint of the PUB socket, tcp://HOST:PORT or ipc://PATH, in place of
	// Host and the ports. Replay is that of the replay socket; empty means that there is
	// none.
	Connect string
	Replay  string
	// Topic is the prefix of the topics to read; empty means all.
	Topic string

	// ReplayTimeout is how long a reply of the replay socket may take: 10 ms to 1 h,
	// config.DefaultReplayTimeout unless set.
	ReplayTimeout time.Duration
	// ReconnectMin and ReconnectMax bound the backoff of reconnecting, which doubles:
	// config.DefaultReconnectMin and config.DefaultReconnectMax unless set.
	ReconnectMin time.Duration
	ReconnectMax time.Duration
	// Silence is how long a connection may be silent before it is verified:
	// config.DefaultSilence unless set; negative disables it.
	Silence time.Duration
	// PollInterval is how often Connect, WaitConnected and Reconnect check the connection:
	// 1 ms to 1 min, DefaultPollInterval unless set. Events are not polled for.
	PollInterval time.Duration
	// Buffer is how many events may wait for the handler: DefaultBuffer unless set,
	// MaxBuffer at most. While it is full nothing is read; what ZeroMQ then drops is
	// requested from the replay socket, or reported as a gap where there is none.
	Buffer int

	// Metrics is where the metrics are registered while the Client runs; nil means
	// nowhere. Those of package ingest get the label client with the value of Worker, so
	// that many Clients can share a Registerer, but not with an Ingest.
	Metrics prometheus.Registerer
	// Logger is for the operator; nil discards. Its level is ignored: LogLevel decides.
	Logger *slog.Logger
	// LogLevel is the lowest level that is logged, until SetLogLevel.
	LogLevel slog.Level
}

// DefaultConfig returns the Config of an engine at a host, with every
// default filled in.
func DefaultConfig(worker, host, model string) Config {
	return Config{Worker: worker, Host: host, Model: model}.withDefaults()
}

// ValidateConfig is Config.Validate, as a function.
func ValidateConfig(c Config) error { return c.Validate() }

// withDefaults returns the Config with its zero fields filled in.
func (c Config) withDefaults() Config {
	fill(&c.Engine, feed.EngineVLLM)
	if c.Connect == "" {
		fill(&c.PubPort, DefaultPubPort)
		fill(&c.ReplayPort, config.DefaultReplayPort)
	}
	fill(&c.ReplayTimeout, config.DefaultReplayTimeout)
	fill(&c.ReconnectMin, config.DefaultReconnectMin)
	fill(&c.ReconnectMax, max(config.DefaultReconnectMax, c.ReconnectMin))
	fill(&c.Silence, config.DefaultSilence)
	fill(&c.PollInterval, DefaultPollInterval)
	fill(&c.Buffer, DefaultBuffer)
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

func fill[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// connect returns the publisher's endpoint; empty where the config says none.
func (c Config) connect() string {
	if c.Connect != "" || c.Host == "" {
		return c.Connect
	}
	return tcpEndpoint(c.Host, c.PubPort)
}

// replay returns the replay socket's endpoint; empty where there is none.
func (c Config) replay() string {
	if c.Connect != "" || c.Host == "" || c.ReplayPort < 0 {
		return c.Replay
	}
	return tcpEndpoint(c.Host, c.ReplayPort)
}

func tcpEndpoint(host string, port int) string {
	return "tcp://" + net.JoinHostPort(unbracketed(host), strconv.Itoa(port))
}

// unbracketed returns an IPv6 address without its brackets, and any other host as
// it is.
func unbracketed(host string) string {
	if inner, ok := strings.CutPrefix(host, "["); ok && strings.HasSuffix(inner, "]") {
		return strings.TrimSuffix(inner, "]")
	}
	return host
}

// ingest returns the config of package ingest. The worker is never removed.
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

// Validate returns a FieldError for each field that holds what it must not, all
// joined to one error, or nil.
func (c Config) Validate() error {
	v := &config.Validation{Names: make(map[string]struct{})}
	given := c
	c = c.withDefaults()
	if given.Worker != "" || given.Connect != "" {
		v.Name("Worker", c.Worker)
	}
	v.Check(config.ValidModel(c.Model), "Model", c.Model, config.AllowedModel)
	v.Check(c.Engine.Known(), "Engine", string(c.Engine), config.AllowedEngines)
	if given.Connect != "" {
		checkEndpoints(v, given)
	} else {
		checkHost(v, given, c)
	}
	v.Check(len(c.Topic) <= config.MaxTopicBytes && config.Printable(c.Topic), "Topic", c.Topic,
		fmt.Sprintf("at most %d bytes of UTF-8 without control characters", config.MaxTopicBytes))
	v.Check(c.ReplayTimeout >= 10*time.Millisecond && c.ReplayTimeout <= time.Hour,
		"ReplayTimeout", c.ReplayTimeout, "10 ms to 1 h")
	v.Check(c.ReconnectMin >= time.Millisecond && c.ReconnectMin <= time.Hour,
		"ReconnectMin", c.ReconnectMin, "1 ms to 1 h")
	v.Check(c.ReconnectMax >= c.ReconnectMin && c.ReconnectMax <= time.Hour,
		"ReconnectMax", c.ReconnectMax, "ReconnectMin to 1 h")
	v.Check(c.Silence < 0 || c.Silence >= 10*time.Millisecond, "Silence", c.Silence, "10 ms or more, or negative for never")
	v.Check(c.PollInterval >= time.Millisecond && c.PollInterval <= time.Minute,
		"PollInterval", c.PollInterval, "1 ms to 1 min")
	v.Check(c.Buffer >= 1 && c.Buffer <= MaxBuffer, "Buffer", c.Buffer, fmt.Sprintf("1 to %d", MaxBuffer))
	return errors.Join(v.Errs...)
}

// checkHost checks Host and the ports.
func checkHost(v *config.Validation, given, c Config) {
	v.Check(validHost(c.Host), "Host", c.Host, allowedHost)
	v.Check(c.PubPort >= 1 && c.PubPort <= config.MaxPort, "PubPort", c.PubPort, allowedPort)
	v.Check(c.ReplayPort <= config.MaxPort, "ReplayPort", c.ReplayPort, allowedPort+", or negative for none")
	v.Check(c.ReplayPort != c.PubPort, "ReplayPort", c.ReplayPort, "another port than PubPort")
	v.Check(given.Replay == "", "Replay", given.Replay, "empty unless Connect is set")
}

// checkEndpoints checks Connect and Replay.
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

// The lengths of host names, of RFC 1035.
const (
	maxHostBytes  = 253
	maxLabelBytes = 63
)

// validHost reports whether a host is an address, other than the unspecified one, or a
// name as of RFC 1123, which may have underscores, as the names of containers do.
func validHost(host string) bool {
	if a, err := netip.ParseAddr(unbracketed(host)); err == nil {
		return !a.IsUnspecified() && (a.Is6() || host == unbracketed(host)) && (a.Zone() == "" || validLabel(a.Zone()))
	}
	name := strings.TrimSuffix(host, ".")
	if name == "" || len(name) > maxHostBytes {
		return false
	}
	labels := strings.Split(name, ".")
	for _, label := range labels {
		if !validLabel(label) {
			return false
		}
	}
	// A name that ends in a number is a malformed IPv4 address.
	_, err := strconv.ParseUint(labels[len(labels)-1], 10, 64)
	return err != nil
}

func validLabel(label string) bool {
	if label == "" || len(label) > maxLabelBytes || label[0] == '-' || label[len(label)-1] == '-' {
		return false
	}
	for i := range len(label) {
		switch c := label[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_':
		default:
			return false
		}
	}
	return true
}
