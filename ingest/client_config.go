package ingest

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

// Defaults and limits of a ClientConfig, beside those of a Config.
const (
	// DefaultPubPort is the port where an engine publishes: vLLM's.
	DefaultPubPort = 5557
	// DefaultBuffer is how many events wait for a Client's handler.
	DefaultBuffer = 1000
	// DefaultPollInterval is how often Connect, WaitConnected and Reconnect look
	// whether there is a connection.
	DefaultPollInterval = 100 * time.Millisecond
	// MaxBuffer is how many events may wait for a handler at most.
	MaxBuffer = 1_000_000
)

// ClientConfig is the engine that a Client reads: Host or Connect says where it
// is, and in each other field the zero value stands for the default.
type ClientConfig struct {
	// Worker names the engine in events, logs and metrics, 1 to MaxNameBytes bytes:
	// its host and port, or the path of its socket, unless set.
	Worker string
	// Model is at most MaxModelBytes bytes; empty means that it is not known.
	Model string
	// BlockSize is in tokens; 0 means that of the first store.
	BlockSize uint32
	// Engine is what publishes: EngineVLLM unless set.
	Engine feed.Engine

	// Host is a host name, an IPv4 address, or an IPv6 address with or without
	// brackets. A name is looked up again for each new connection.
	Host string
	// PubPort is where the engine publishes: DefaultPubPort unless set.
	PubPort int
	// ReplayPort is where its ROUTER socket replays: DefaultReplayPort unless set;
	// negative means that there is none, so that lost batches are told as gaps.
	ReplayPort int
	// Connect is the publisher's whole endpoint, tcp://HOST:PORT or ipc://PATH, in
	// the place of Host and the ports. Replay is that of the replay socket; empty
	// means that there is none.
	Connect string
	Replay  string
	// Topic is the prefix of the topics to read; empty means all.
	Topic string

	// ReplayTimeout is how long the replay socket may say nothing: 10 ms to 1 h,
	// DefaultReplayTimeout unless set.
	ReplayTimeout time.Duration
	// ReconnectMin and ReconnectMax bound the wait before a connection that broke is
	// tried again, which doubles each time: DefaultReconnectMin and
	// DefaultReconnectMax unless set.
	ReconnectMin time.Duration
	ReconnectMax time.Duration
	// Silence is how long the engine may say nothing before its connection is
	// tested: DefaultSilence unless set; negative means for ever.
	Silence time.Duration
	// PollInterval is how often those who wait for a connection look for it:
	// DefaultPollInterval unless set. Events are not polled for: they are read when
	// they come.
	PollInterval time.Duration
	// Buffer is how many events may wait for the handler: DefaultBuffer unless set,
	// MaxBuffer at most. When so many wait no more are read, so that they wait in
	// ZeroMQ, and then at the engine; what it drops is fetched from its replay
	// socket, or told as a gap where it has none.
	Buffer int

	// Metrics is where the metrics are registered while the Client runs; nil means
	// nowhere. Those that an Ingest has too get a label more, client, whose value is
	// Worker, so that many Clients can have the same Registerer, but no Ingest
	// beside them.
	Metrics prometheus.Registerer
	// Logger takes what an operator should know; nil means no one does. Its level is
	// not asked for: LogLevel decides.
	Logger *slog.Logger
	// LogLevel is the least level that is logged, until SetLogLevel sets another.
	LogLevel slog.Level
}

// DefaultClientConfig returns the ClientConfig of an engine at a host, with every
// default filled in.
func DefaultClientConfig(worker, host, model string) ClientConfig {
	return ClientConfig{Worker: worker, Host: host, Model: model}.withDefaults()
}

// ValidateConfig is ClientConfig.Validate, as a function.
func ValidateConfig(c ClientConfig) error { return c.Validate() }

// withDefaults returns the ClientConfig with its zero fields filled in.
func (c ClientConfig) withDefaults() ClientConfig {
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
func (c ClientConfig) connect() string {
	if c.Connect != "" || c.Host == "" {
		return c.Connect
	}
	return tcpEndpoint(c.Host, c.PubPort)
}

// replay returns the replay socket's endpoint; empty where there is none.
func (c ClientConfig) replay() string {
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

// ingest returns the Config of the Ingest that reads for the Client. An engine that
// is away does not leave: it is taken up again where it was left.
func (c ClientConfig) ingest() config.Config {
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
func (c ClientConfig) Validate() error {
	v := &config.Validation{Names: make(map[string]struct{})}
	given := c
	c = c.withDefaults()
	if given.Worker != "" || given.Connect != "" {
		v.Name("Worker", c.Worker)
	}
	v.Check(config.ValidModel(c.Model), "Model", c.Model, config.AllowedModel)
	v.Check(c.Engine.Known(), "Engine", string(c.Engine), config.AllowedEngines)
	if given.Connect != "" {
		clientEndpoints(v, given)
	} else {
		clientHost(v, given, c)
	}
	v.Check(len(c.Topic) <= maxTopicBytes && config.Printable(c.Topic), "Topic", c.Topic,
		fmt.Sprintf("at most %d bytes of UTF-8 without control characters", maxTopicBytes))
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

// clientHost checks where the engine is, as Host and the ports say.
func clientHost(v *config.Validation, given, c ClientConfig) {
	v.Check(validHost(c.Host), "Host", c.Host, allowedHost)
	v.Check(c.PubPort >= 1 && c.PubPort <= config.MaxPort, "PubPort", c.PubPort, allowedPort)
	v.Check(c.ReplayPort <= config.MaxPort, "ReplayPort", c.ReplayPort, allowedPort+", or negative for none")
	v.Check(c.ReplayPort != c.PubPort, "ReplayPort", c.ReplayPort, "another port than PubPort")
	v.Check(given.Replay == "", "Replay", given.Replay, "empty unless Connect is set: ReplayPort says where")
}

// clientEndpoints checks where the engine is, as Connect and Replay say.
func clientEndpoints(v *config.Validation, given ClientConfig) {
	const unused = " where Connect is set"
	v.Check(given.Host == "", "Host", given.Host, "empty"+unused)
	v.Check(given.PubPort == 0, "PubPort", given.PubPort, "0"+unused)
	v.Check(given.ReplayPort == 0, "ReplayPort", given.ReplayPort, "0"+unused)
	clientEndpoint(v, "Connect", given.Connect)
	if given.Replay != "" {
		clientEndpoint(v, "Replay", given.Replay)
		v.Check(given.Replay != given.Connect, "Replay", given.Replay, "another endpoint than Connect")
	}
}

func clientEndpoint(v *config.Validation, field, value string) {
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

// validHost tells whether a host may be connected to: an address, other than that
// which stands for all of a machine's, or a name of RFC 1123's form, in which an
// underscore may stand too, as in the names of containers.
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
	// A name that ends in a number is an IPv4 address that is none.
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
