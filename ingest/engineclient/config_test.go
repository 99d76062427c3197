package engineclient_test

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/engineclient"
	"github.com/kvcast/kvcast/internal/feed"
)

func TestClientConfigValidate(t *testing.T) {
	t.Parallel()
	host := func(h string) engineclient.Config { return engineclient.Config{Host: h} }
	with := func(change func(*engineclient.Config)) engineclient.Config {
		c := host("h")
		change(&c)
		return c
	}
	connect := func(endpoint, replay string) engineclient.Config {
		return engineclient.Config{Connect: endpoint, Replay: replay}
	}
	label := strings.Repeat("l", 63)
	tests := []struct {
		name   string
		config engineclient.Config
		want   []string // invalid fields; nil if none
	}{
		{"zero", engineclient.Config{}, []string{"Host"}},
		{"defaults", engineclient.DefaultConfig("w", "10.0.0.5", "m"), nil},

		{"host name", host("vllm-0.vllm.default.svc"), nil},
		{"host name of one label", host("localhost"), nil},
		{"host name that ends in a dot", host("vllm.example."), nil},
		{"host name of a container", host("my_engine-1"), nil},
		{"host name that begins with a digit", host("3com.example"), nil},
		{"longest label", host(label + ".example"), nil},
		{"label too long", host(label + "l.example"), []string{"Host"}},
		{"longest host name", host(strings.Join([]string{label, label, label, label[:61]}, ".")), nil},
		{"host name too long", host(strings.Join([]string{label, label, label, label[:62]}, ".")), []string{"Host"}},
		{"empty label", host("a..b"), []string{"Host"}},
		{"only a dot", host("."), []string{"Host"}},
		{"label begins with a hyphen", host("-a.b"), []string{"Host"}},
		{"label ends with a hyphen", host("a-.b"), []string{"Host"}},
		{"space", host("a b"), []string{"Host"}},
		{"slash", host("a/b"), []string{"Host"}},
		{"letters beyond ASCII", host("bücher"), []string{"Host"}},
		{"with a port", host("a:5557"), []string{"Host"}},
		{"an endpoint", host("tcp://a"), []string{"Host"}},
		{"any host", host("*"), []string{"Host"}},

		{"IPv4", host("10.0.0.5"), nil},
		{"IPv4 with a part above 255", host("10.0.0.256"), []string{"Host"}},
		{"IPv4 of three parts", host("10.0.0"), []string{"Host"}},
		{"IPv4 with a leading zero", host("10.0.0.05"), []string{"Host"}},
		{"IPv4 in brackets", host("[10.0.0.5]"), []string{"Host"}},
		{"unspecified IPv4", host("0.0.0.0"), []string{"Host"}},
		{"IPv6", host("2001:db8::1"), nil},
		{"IPv6 in brackets", host("[2001:db8::1]"), nil},
		{"IPv6 of IPv4", host("::ffff:10.0.0.5"), nil},
		{"IPv6 with a zone", host("fe80::1%eth0"), nil},
		{"IPv6 with a bad zone", host("fe80::1%a b"), []string{"Host"}},
		{"IPv6 of nine parts", host("1:2:3:4:5:6:7:8:9"), []string{"Host"}},
		{"IPv6 with half its brackets", host("[::1"), []string{"Host"}},
		{"unspecified IPv6", host("::"), []string{"Host"}},

		{"ports", with(func(c *engineclient.Config) { c.PubPort, c.ReplayPort = 1, 65535 }), nil},
		{"no replay", with(func(c *engineclient.Config) { c.ReplayPort = -1 }), nil},
		{"PUB port below 0", with(func(c *engineclient.Config) { c.PubPort = -1 }), []string{"PubPort"}},
		{"ports too large", with(func(c *engineclient.Config) { c.PubPort, c.ReplayPort = 65536, 65537 }), []string{"PubPort", "ReplayPort"}},
		{"one port for both", with(func(c *engineclient.Config) { c.ReplayPort = 5557 }), []string{"ReplayPort"}},
		{"replay endpoint beside a host", with(func(c *engineclient.Config) { c.Replay = "tcp://h:1" }), []string{"Replay"}},

		{"endpoints", connect("tcp://h:1", "tcp://[::1]:2"), nil},
		{"endpoint without replay", connect("ipc:///run/kv", ""), nil},
		{"bad endpoints", connect("h:1", "tcp://h"), []string{"Connect", "Replay"}},
		{"bad hosts in endpoints", connect("tcp://-h:1", "tcp://0.0.0.0:1"), []string{"Connect", "Replay"}},
		{"one endpoint for both", connect("tcp://h:1", "tcp://h:1"), []string{"Replay"}},
		{
			"endpoint and host",
			engineclient.Config{Connect: "tcp://h:1", Host: "h", PubPort: 1, ReplayPort: 2},
			[]string{"Host", "PubPort", "ReplayPort"},
		},
		{"path that is not a valid name", connect("ipc:///\xff", ""), []string{"Worker", "Connect"}},

		{"longest worker", with(func(c *engineclient.Config) { c.Worker = strings.Repeat("n", 253) }), nil},
		{"worker too long", with(func(c *engineclient.Config) { c.Worker = strings.Repeat("n", 254) }), []string{"Worker"}},
		{"worker with a control character", with(func(c *engineclient.Config) { c.Worker = "a\nb" }), []string{"Worker"}},
		{"model too long", with(func(c *engineclient.Config) { c.Model = strings.Repeat("m", 1025) }), []string{"Model"}},
		{"engine", with(func(c *engineclient.Config) { c.Engine = "vLLM" }), []string{"Engine"}},
		{"topic", with(func(c *engineclient.Config) { c.Topic = "kv@pod@org/model" }), nil},
		{"longest topic", with(func(c *engineclient.Config) { c.Topic = strings.Repeat("t", 2048) }), nil},
		{"topic too long", with(func(c *engineclient.Config) { c.Topic = strings.Repeat("t", 2049) }), []string{"Topic"}},
		{"topic that is not UTF-8", with(func(c *engineclient.Config) { c.Topic = "\xff" }), []string{"Topic"}},
		{"topic with a NUL", with(func(c *engineclient.Config) { c.Topic = "kv\x00" }), []string{"Topic"}},

		{
			"durations too short",
			with(func(c *engineclient.Config) {
				c.ReplayTimeout, c.ReconnectMin, c.Silence, c.PollInterval = 1, 1, 1, 1
			}),
			[]string{"ReplayTimeout", "ReconnectMin", "Silence", "PollInterval"},
		},
		{
			"durations too long",
			with(func(c *engineclient.Config) {
				c.ReplayTimeout, c.ReconnectMin, c.ReconnectMax, c.PollInterval = 2*time.Hour, 2*time.Hour, 3*time.Hour, time.Hour
			}),
			[]string{"ReplayTimeout", "ReconnectMin", "ReconnectMax", "PollInterval"},
		},
		{
			"durations below 0",
			with(func(c *engineclient.Config) { c.ReplayTimeout, c.ReconnectMin, c.PollInterval = -1, -1, -1 }),
			[]string{"ReplayTimeout", "ReconnectMin", "PollInterval"},
		},
		{"never silent", with(func(c *engineclient.Config) { c.Silence = -1 }), nil},
		{"reconnect max below min", with(func(c *engineclient.Config) { c.ReconnectMax = time.Millisecond }), []string{"ReconnectMax"}},
		{"buffer below 0", with(func(c *engineclient.Config) { c.Buffer = -1 }), []string{"Buffer"}},
		{"largest buffer", with(func(c *engineclient.Config) { c.Buffer = engineclient.MaxBuffer }), nil},
		{"buffer too large", with(func(c *engineclient.Config) { c.Buffer = engineclient.MaxBuffer + 1 }), []string{"Buffer"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got []string
			if err := tt.config.Validate(); err != nil {
				for _, err := range err.(interface{ Unwrap() []error }).Unwrap() {
					var field *config.FieldError
					if !errors.As(err, &field) {
						t.Fatalf("%v is no FieldError", err)
					}
					if !strings.HasPrefix(err.Error(), field.Field+" is ") || field.Allowed == "" {
						t.Errorf("error %q", err)
					}
					got = append(got, field.Field)
				}
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("fields (-want +got):\n%s", d)
			}
			_, err := engineclient.New(tt.config, discard)
			if (err == nil) != (len(tt.want) == 0) {
				t.Errorf("NewClient: %v", err)
			}
		})
	}
}

func TestFieldErrorDescribesValidValues(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		config engineclient.Config
		want   string
	}{
		{
			engineclient.Config{Host: "10.0.0.256"},
			`Host is "10.0.0.256": must be a host name, an IPv4 address, or an IPv6 address, without a port`,
		},
		{
			engineclient.Config{Host: "h", PubPort: 70000},
			`PubPort is 70000: must be 1 to 65535`,
		},
		{
			engineclient.Config{Connect: "10.0.0.5:5557"},
			`Connect is "10.0.0.5:5557": must be tcp://HOST:PORT with a port of 1 to 65535, or ipc://PATH`,
		},
		{
			engineclient.Config{Host: "h", ReplayTimeout: time.Millisecond},
			`ReplayTimeout is 1ms: must be 10 ms to 1 h`,
		},
		{
			engineclient.Config{Host: "h", Buffer: -1},
			`Buffer is -1: must be 1 to 1000000`,
		},
	} {
		if err := tt.config.Validate(); err == nil || err.Error() != tt.want {
			t.Errorf("got %v, want %s", err, tt.want)
		}
	}
}

func TestClientDefaults(t *testing.T) {
	t.Parallel()
	want := engineclient.Config{
		Worker:        "[::1]:5557",
		Model:         "m",
		Engine:        feed.EngineVLLM,
		Host:          "::1",
		PubPort:       5557,
		ReplayPort:    5558,
		ReplayTimeout: 5 * time.Second,
		ReconnectMin:  time.Second,
		ReconnectMax:  30 * time.Second,
		Silence:       30 * time.Second,
		PollInterval:  100 * time.Millisecond,
		Buffer:        1000,
		LogLevel:      slog.LevelInfo,
	}
	c, err := engineclient.New(engineclient.Config{Host: "::1", Model: "m"}, discard)
	if err != nil {
		t.Fatal(err)
	}
	for _, got := range []engineclient.Config{c.Config(), engineclient.DefaultConfig("", "::1", "m")} {
		if d := cmp.Diff(want, got, cmpopts.IgnoreFields(got, "Logger")); d != "" {
			t.Errorf("defaults (-want +got):\n%s", d)
		}
	}
}
