package simulate

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/simulator/workload"
	"github.com/kvcast/kvcast/internal/wire"
)

const (
	maxEngines  = 256
	defaultBind = "tcp://127.0.0.1:5557"
	// replayPoll is how often vLLM's publisher checks for replay requests while it has nothing to publish.
	replayPoll = 100 * time.Millisecond
)

// orElse returns the value of a flag, or the given value if flag is nil.
func orElse[T any](flag *T, value T) T {
	if flag != nil {
		return *flag
	}
	return value
}

// validate returns the first mistake in the flags, except --faults and --trace.
func (c *Command) validate() error {
	switch {
	case c.Engines < 1 || c.Engines > maxEngines:
		return fmt.Errorf("--engines: %d is not allowed: want 1 to %d", c.Engines, maxEngines)
	case orElse(c.Blocks, 1) < 1 || c.BlockSize < 1:
		return errors.New("--blocks and --block-size: want 1 or more")
	case !(orElse(c.Rate, 0) >= 0): // rejects NaN too
		return fmt.Errorf("--rate: %v is not allowed: want 0 or more batches per second", *c.Rate)
	case !(orElse(c.Speed, 0) >= 0):
		return fmt.Errorf("--speed: %v is not allowed: want 0 or more", *c.Speed)
	case slices.ContainsFunc(c.Window, func(w int) bool { return w < 2 }):
		return fmt.Errorf("--window: %v is not allowed: want windows of 2 or more tokens", c.Window)
	case c.Requests < 0:
		return fmt.Errorf("--requests: %d is not allowed: want 0 or more", c.Requests)
	case c.Progress < 0:
		return fmt.Errorf("--progress: %s is not allowed: want 0 or more", c.Progress)
	case c.Trace == "" && (c.Speed != nil || c.Requests > 0 || c.Policy == "prefix"):
		return errors.New("--speed, --requests and --policy apply to a trace: give --trace too")
	case c.Trace != "" && workload.TraceBlock%c.BlockSize != 0:
		return fmt.Errorf("--block-size: %d is not allowed with --trace: want a divisor of %d", c.BlockSize, workload.TraceBlock)
	}
	for _, e := range []struct{ flag, endpoint string }{{"--bind", c.Bind}, {"--connect", c.Connect}, {"--replay", c.Replay}} {
		if scheme, rest, ok := strings.Cut(e.endpoint, "://"); e.endpoint != "" && (!ok || rest == "" || scheme != "tcp" && scheme != "ipc") {
			return fmt.Errorf("%s: %q is not allowed: want tcp://HOST:PORT or ipc://PATH", e.flag, e.endpoint)
		}
	}
	return nil
}

// configs returns the configuration of each engine.
func (c *Command) configs() ([]simulator.Config, error) {
	if err := c.validate(); err != nil {
		return nil, cli.UsageError{Err: err}
	}
	var faults simulator.Faults
	if c.Faults != "" {
		var err error
		if faults, err = simulator.ParseFaults(c.Faults); err != nil {
			return nil, cli.UsageError{Err: fmt.Errorf("--faults: %w", err)}
		}
	}
	traces, err := c.traces()
	if err != nil {
		return nil, err
	}
	configs := make([]simulator.Config, c.Engines)
	for i := range configs {
		cfg := simulator.Config{
			Seed:    c.Seed + uint64(i),
			Faults:  faults,
			Batches: c.Batches,
			Rate:    orElse(c.Rate, 20),
			Pool:    blockpool.Config{Capacity: orElse(c.Blocks, 2048), BlockSize: c.BlockSize, Groups: c.groups()},
			Linger:  c.Stay,
		}
		cfg.Pool.VLLMHashes = len(cfg.Pool.Groups) > 0
		cfg.Faults.Seed = orElse(c.FaultSeed, c.Seed) + uint64(i)
		if traces != nil {
			cfg.Trace, cfg.Speed = traces[i], orElse(c.Speed, 1)
			cfg.Pool.Capacity = orElse(c.Blocks, 65_536)
		}
		if c.Wait {
			cfg.Subscribers = 1
		}
		if err := c.setSockets(&cfg, i); err != nil {
			return nil, cli.UsageError{Err: err}
		}
		configs[i] = cfg
	}
	return configs, nil
}

// groups returns the attention groups beside full attention.
func (c *Command) groups() (all []blockpool.Group) {
	for _, w := range c.Window {
		all = append(all, blockpool.Group{Window: w})
	}
	if c.Mamba {
		all = append(all, blockpool.Group{})
	}
	return all
}

// traces returns the requests of each engine; nil without --trace.
func (c *Command) traces() ([]*workload.Trace, error) {
	var trace *workload.Trace
	var err error
	switch c.Trace {
	case "":
		return nil, nil
	case "conversation":
		trace, err = workload.ConversationTrace()
	default:
		trace, err = workload.OpenTrace(c.Trace)
	}
	if err != nil {
		return nil, err
	}
	if c.Requests > 0 {
		trace.Requests = trace.Requests[:min(c.Requests, len(trace.Requests))]
	}
	policy := workload.PolicyRoundRobin
	if c.Policy == "prefix" {
		policy = workload.PolicyPrefix
	}
	return trace.Split(c.Engines, policy)
}

func countRequests(configs []simulator.Config) (n int) {
	for _, cfg := range configs {
		if cfg.Trace != nil {
			n += len(cfg.Trace.Requests)
		}
	}
	return n
}

// setSockets sets the endpoints, topic, dp rank and encoding of engine i.
func (c *Command) setSockets(cfg *simulator.Config, i int) (err error) {
	cfg.BatchForm, cfg.EventForm = wire.FormArray, wire.FormArray
	if c.Form == "map" {
		cfg.BatchForm, cfg.EventForm = wire.FormMap, wire.FormMap
	}
	cfg.Mode, cfg.Endpoint = simulator.ModeConnect, c.Connect
	if c.Connect != "" {
		cfg.Topic = "kv@" + c.worker(i) + "@" + c.Model
	} else {
		cfg.Mode = simulator.ModeBind
		if cfg.Endpoint, err = addToPort(cmp.Or(c.Bind, defaultBind), i); err != nil {
			return fmt.Errorf("--bind: %w", err)
		}
	}
	if c.Replay != "" {
		cfg.ReplayPoll = replayPoll
		if host, ok := c.replayHost(i); ok && !c.sharesHost() {
			cfg.Replay = "tcp://" + host + c.Replay[strings.LastIndexByte(c.Replay, ':'):]
		} else if cfg.Replay, err = addToPort(c.Replay, i); err != nil {
			return fmt.Errorf("--replay: %w", err)
		}
	}
	if c.Ranks {
		cfg.Rank = uint32(i)
	}
	return nil
}

func (c *Command) name(i int) string {
	if host, ok := c.replayHost(i); ok && !c.Ranks {
		return host
	}
	return fmt.Sprintf("%s-%d", cmp.Or(c.Name, "sim"), i)
}

// worker returns the name of the worker that engine i belongs to.
func (c *Command) worker(i int) string {
	if !c.Ranks {
		return c.name(i)
	}
	if host, ok := c.replayHost(i); ok {
		return host
	}
	return cmp.Or(c.Name, "sim")
}

// replayHost returns the host that is the name of engine i. kvcast requests replays from the host in the topic. It returns
// false if the engine has another name.
func (c *Command) replayHost(i int) (host string, ok bool) {
	if c.Connect == "" || c.Replay == "" || c.Name != "" {
		return "", false
	}
	host, _, err := net.SplitHostPort(strings.TrimPrefix(c.Replay, "tcp://"))
	if err != nil || !strings.HasPrefix(c.Replay, "tcp://") || host == "*" {
		return "", false
	}
	first, err := netip.ParseAddr(host)
	switch {
	case err != nil || first.IsUnspecified():
		return host, err != nil && c.sharesHost()
	case c.sharesHost():
		return host, true
	case !first.Is4():
		return "", false
	}
	for range i {
		first = first.Next()
	}
	return first.String(), true
}

// sharesHost reports whether all engines have the same replay host.
func (c *Command) sharesHost() bool { return c.Engines == 1 || c.Ranks }

// addToPort returns a tcp endpoint with a port that is n higher. It returns the endpoint unchanged if the system chooses the
// port (* or 0), or n is 0.
func addToPort(endpoint string, n int) (string, error) {
	i := strings.LastIndexByte(endpoint, ':')
	port := endpoint[i+1:]
	if n == 0 || port == "*" || port == "0" {
		return endpoint, nil
	}
	first, err := strconv.ParseUint(port, 10, 16)
	if !strings.HasPrefix(endpoint, "tcp://") || err != nil || int(first)+n > 65535 {
		return "", fmt.Errorf("%q is not allowed for several engines: want tcp://HOST:PORT with at least %d higher ports", endpoint, n)
	}
	return fmt.Sprintf("%s%d", endpoint[:i+1], int(first)+n), nil
}
