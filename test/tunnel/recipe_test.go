package tunnel_test

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/test/harness"
)

// Hosts of the recipe.
const (
	engineHost = "vllm-0"
	kvcastHost = "kvcast"
)

// recipe are the commands of a section of docs/tunnels.md, for this host: names, ports, and directories are replaced.
type recipe struct {
	t   *testing.T
	dir string // working directory of the commands
	// ports has the ports of this host by those of the recipe, such as kvcast:5557.
	ports map[string]int

	tunnels []tunnel
	engine  simulator.SocketConfig
	serve   []string // arguments of kvcast
}

// tunnel is a command of ghostunnel.
type tunnel struct {
	host   string
	server bool // TLS comes in, and leaves to a target without TLS; otherwise it is the other way round
	args   []string
}

var (
	word = regexp.MustCompile(`'[^']*'|\S+`)
	// port matches what is replaced: the name of a host, loopback or all addresses, each with a port, and a port that an argument names.
	port = regexp.MustCompile(`(?:(kvcast|vllm-0)\.example\.com:|127\.0\.0\.1:|(replay_port=)|^:)(\d+)`)
)

// readRecipe reads the section with a heading.
func readRecipe(t *testing.T, heading string) *recipe {
	t.Helper()
	text, err := os.ReadFile("../../docs/tunnels.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, ok := strings.Cut(string(text), "\n### "+heading+"\n")
	section, _, _ = strings.Cut(section, "\n### ")
	blocks := strings.Split(section, "```sh\n")[1:]
	if !ok || len(blocks) != 2 {
		t.Fatalf("docs/tunnels.md has %d blocks of commands under %q, want 2", len(blocks), heading)
	}
	// Paths of Unix sockets are short.
	dir, err := os.MkdirTemp("", "tunnel")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	r := &recipe{t: t, dir: dir, ports: make(map[string]int)}
	for i, host := range []string{engineHost, kvcastHost} {
		commands, _, _ := strings.Cut(blocks[i], "```")
		for line := range strings.Lines(commands) {
			r.add(host, r.here(host, word.FindAllString(line, -1)))
		}
	}
	if len(r.tunnels) != 4 || r.engine.Endpoint == "" || r.serve == nil {
		t.Fatalf("under %q are %d tunnels, the engine %q and the server %q", heading, len(r.tunnels), r.engine.Endpoint, r.serve)
	}
	return r
}

// here replaces what is of the recipe's hosts.
func (r *recipe) here(host string, words []string) []string {
	for i, w := range words {
		w = strings.ReplaceAll(strings.Trim(w, "'"), "/run/kvcast", r.dir)
		words[i] = port.ReplaceAllStringFunc(w, func(found string) string {
			m := port.FindStringSubmatch(found)
			of, address := host, "127.0.0.1:"
			if m[1] != "" {
				of, address = m[1], "localhost:"
			}
			if m[2] != "" {
				address = m[2]
			}
			return fmt.Sprintf("%s%d", address, r.port(of+":"+m[3]))
		})
	}
	return words
}

// port returns the port of this host for one of the recipe.
func (r *recipe) port(of string) int {
	if r.ports[of] == 0 {
		r.ports[of] = harness.FreePort(r.t)
	}
	return r.ports[of]
}

func (r *recipe) add(host string, command []string) {
	r.t.Helper()
	switch {
	case command[0] == "ghostunnel":
		r.tunnels = append(r.tunnels, tunnel{host, command[1] == "server", command[1:]})
	case command[0] == "kvcast" && command[1] == "serve":
		r.serve = command[2:]
	case command[0] == "vllm":
		var events struct {
			Endpoint string `json:"endpoint"`
			Replay   string `json:"replay_endpoint"`
			Topic    string `json:"topic"`
		}
		if err := json.Unmarshal([]byte(command[len(command)-1]), &events); err != nil {
			r.t.Fatal(err)
		}
		r.engine = simulator.SocketConfig{Endpoint: events.Endpoint, Replay: events.Replay, Topic: events.Topic}
	default:
		r.t.Fatalf("docs/tunnels.md has the command %q", command)
	}
}

// flag returns the value of a flag.
func (u tunnel) flag(name string) string { return u.args[slices.Index(u.args, name)+1] }

// peer returns the URI of the certificate that the other end of a tunnel must have.
func (u tunnel) peer() string {
	if u.server {
		return u.flag("--allow-uri")
	}
	return u.flag("--verify-uri")
}
