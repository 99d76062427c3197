package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/alecthomas/kong"
)

// settingFlags are the settings as flags: what the command line knows of them,
// which is names and help. Their text is read where the file's is.
//
// Those of which only the default is built are hidden.
type settingFlags struct {
	Listen   string `default:":50051" help:"Where routers connect: gRPC."`
	Admin    string `default:"127.0.0.1:9464" help:"Where the operator looks: /metrics, /healthz, /readyz, pprof. Empty: nowhere."`
	LogLevel string `default:"info" help:"debug, info, warn or error."`
	Journal  struct {
		Kind     string `default:"memory" hidden:""`
		MaxBytes string `default:"64MiB" help:"Memory for entries to resume from."`
		MaxAge   string `default:"1h" help:"How long entries are kept at most."`
	} `embed:"" prefix:"journal-"`
	Batch struct {
		Timeout   string `default:"0s" help:"How long events may wait to be merged with the next batch's, 0s to 15s."`
		MaxBlocks string `default:"128" help:"The most blocks in an event, 1 to 16384."`
	} `embed:"" prefix:"batch-"`
	Ingest struct {
		OnGap              string `default:"report" help:"What becomes of a rank's blocks when batches are lost for good: report keeps them and tells of the gap, clear empties the rank."`
		MaxBlocksPerRank   string `default:"4000000" help:"The most blocks of a dp rank. Beyond it those from before a gap leave, and without a gap further ones are left out, which is told."`
		MaxBlocks          string `default:"16000000" help:"The most blocks of all workers together, each of some 50 bytes; one of a worker whose sources are told of once counts as two, and each source's name for it as one. Beyond it new ones are left out, which is told."`
		MaxAttributeBytes  string `default:"64MiB" help:"Memory for the names of LoRA adapters and the cache salts of all workers, 1MiB or more. Beyond it blocks of new ones are left out, which is told."`
		Silence            string `default:"30s" help:"How long an engine may say nothing before its connection is tested; 0s for ever."`
		Grace              string `default:"1m" help:"How long a worker may be without a connection before it is removed."`
		StartWait          string `default:"5s" help:"How long routers are not let in at the start for engines that can not be reached; 0s lets them in at once, 1h at most."`
		MaxWorkers         string `default:"4096" help:"The most workers."`
		MaxSources         string `default:"4096" help:"The most publishers of all workers: a source counts once for each of its dp ranks, and takes some 6 file descriptors where it is connected to."`
		MaxRanks           string `default:"8192" help:"The most dp ranks of all workers that only their batches have named."`
		WorkerBytes        string `default:"64MiB" help:"Memory for what RegisterWorker says of workers: names, labels, endpoints; 1MiB or more."`
		SaltBytes          string `default:"128MiB" help:"Memory for cache salts, the blocks that carry them, and attention groups, of all engines; 1MiB or more."`
		ReceiveBufferBytes string `default:"256MiB" help:"Memory for messages that were received and wait to be processed, of all engines; 1MiB or more. What does not fit is dropped, and fetched again."`
		ReorderBufferBytes string `default:"128MiB" help:"Memory for live batches that wait for a replay, of all engines; 1MiB or more. What does not fit is fetched again."`
		RegisterHosts      string `placeholder:"HOST,..." help:"Hosts that RegisterWorker may name: IP addresses, CIDRs, names, *.DOMAIN. Empty: any."`
	} `embed:"" prefix:"ingest-"`
	Subscribers struct {
		Max                      string `default:"1024" help:"The most subscribers."`
		MaxConnections           string `default:"4096" help:"The most connections to the gRPC port, and the most health watches, of all clients."`
		MaxConnectionsPerAddress string `default:"2048" help:"The most connections, and health watches, of the clients of one address, or of one /64 of IPv6: behind a NAT or a load balancer all have one."`
		Stall                    string `default:"30s" help:"How long a subscriber may read nothing while there is something to send, 1s to 1h; a snapshot must be read at 8 MiB in this time."`
		Progress                 string `default:"10s" help:"How often an idle subscriber hears that the stream is alive."`
		MaxSnapshots             string `default:"4" help:"The most snapshots that are sent at a time, 1 to 1024."`
		SnapshotWait             string `default:"30s" help:"How long a snapshot beyond them waits for its turn, 100ms to 1h; as many may wait as there may be subscribers."`
		ResponseBytes            string `default:"64KiB" help:"About how much a response holds whose subscriber is behind, 4KiB to 512KiB."`
		FilterBytes              string `default:"64MiB" help:"Memory for the filters of all subscribers and other calls, 1MiB or more."`
		PingInterval             string `default:"10s" help:"How often clients may ping, 1s to 1h; those that ping more often are disconnected."`
		MaxConnectionAge         string `default:"0s" help:"How old a connection may grow, a tenth more or less, before its subscribers are sent to make another, which a load balancer may lead elsewhere; 1s to 8760h, 0s for no limit."`
		MaxConnectionAgeGrace    string `default:"10s" help:"The time within which they are then sent, and how long other calls may go on after that, 1s to 1h."`
	} `embed:"" prefix:"subscribers-"`
	Auth struct {
		Tokens string `placeholder:"FILE" help:"Ask every call for a token of this file: in each line ROLE TOKEN, the role being router or operator, or a comment behind #. It is read at the start."`
	} `embed:"" prefix:"auth-"`
	TLS struct {
		Cert string `placeholder:"FILE" help:"Serve with TLS, and this certificate: PEM, with those between it and its CA behind it. It is read at the start."`
		Key  string `placeholder:"FILE" help:"The certificate's key: PEM."`
	} `embed:"" prefix:"tls-"`
	EmitTokenIDs bool `name:"emit-token-ids" help:"Put the tokens into stored events. They are users' prompts."`
}

// given are the flags on the command line, each with its last value.
func given(line *kong.Context) map[string]string {
	flags := make(map[string]string)
	for _, p := range line.Path {
		if p.Flag != nil {
			flags[p.Flag.Name] = fmt.Sprint(p.Flag.Target.Interface())
		}
	}
	return flags
}

func (r *configReader) flags(from configSources) {
	for _, s := range r.config.settings() {
		if value, ok := from.flags[s.flag()]; ok {
			r.set(s, origin{place: "--" + s.flag()}, value)
		}
	}
	for _, text := range from.workers {
		r.addWorker(origin{place: "--worker " + text}, text)
	}
	for _, text := range from.binds {
		r.addListener(origin{place: "--bind " + text}, text)
	}
}

// environ reads the variables. Those that are not kvcast's are left alone, as
// others set some that begin like its own: Kubernetes does for a service that is
// named kvcast. One that is nearly right is a mistake.
func (r *configReader) environ(environ []string) {
	values := make(map[string]string)
	for _, variable := range environ {
		name, value, _ := strings.Cut(variable, "=")
		values[name] = value
	}
	known := []string{"KVCAST_CONFIG", "KVCAST_WORKER", "KVCAST_BIND", "ZMQ_PORT", tokenVariable}
	for _, s := range r.config.settings() {
		known = append(known, s.variable())
		if value, ok := values[s.variable()]; ok {
			r.set(s, origin{place: s.variable()}, value)
		}
	}
	for i, text := range lines(values["KVCAST_WORKER"]) {
		r.addWorker(origin{place: fmt.Sprintf("KVCAST_WORKER, line %d", i+1)}, text)
	}
	for i, text := range lines(values["KVCAST_BIND"]) {
		r.addListener(origin{place: fmt.Sprintf("KVCAST_BIND, line %d", i+1)}, text)
	}
	// Beside a service named zmq, Kubernetes sets ZMQ_PORT=tcp://ADDRESS:PORT, which
	// is none of ours.
	if port, ok := values["ZMQ_PORT"]; ok && !strings.HasPrefix(port, "tcp://") {
		at := origin{place: "ZMQ_PORT"}
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			r.wrong(at, "", notAllowed(port, "a port, 1 to 65535, such as 5557").Error())
		} else {
			r.addListener(at, "tcp://*:"+port)
		}
	}
	var unknowns []string
	for name := range values {
		if strings.HasPrefix(name, "KVCAST_") && !slices.Contains(known, name) {
			unknowns = append(unknowns, name)
		}
	}
	slices.Sort(unknowns)
	for _, name := range unknowns {
		if meant := nearest(name, known); meant != "" {
			if meant == tokenVariable { // serve does not read it, and must not seem to
				meant = "KVCAST_AUTH_TOKENS, the file of those that are good, or " + meant + ", the one that a client sends"
			}
			r.wrong(origin{place: name}, "", "the variable is not known: did you mean "+meant+"?")
		}
	}
}

// lines returns the lines of a text, without blank ones.
func lines(text string) []string {
	var all []string
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" {
			all = append(all, line)
		}
	}
	return all
}

// set keeps the value of a variable or a flag.
func (r *configReader) set(s setting, at origin, value string) {
	if err := s.set(value); err != nil {
		r.wrong(at, "", err.Error())
		return
	}
	r.origins[s.key] = at
}
