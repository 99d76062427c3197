package simulate

import (
	"strings"
	"testing"
)

// TestEnginesAreNamedAfterTheirReplayHost covers engines that connect to kvcast. Their name is in the topic.
func TestEnginesAreNamedAfterTheirReplayHost(t *testing.T) {
	const connect = "tcp://localhost:5557"
	for _, tt := range []struct {
		cmd  Command
		want string // the topic and the replay endpoint of the last engine
	}{
		{Command{Connect: connect, Engines: 1}, "kv@sim-0@m "},
		{Command{Connect: connect, Engines: 2, Replay: "tcp://127.0.0.1:5558"}, "kv@127.0.0.2@m tcp://127.0.0.2:5558"},
		{Command{Connect: connect, Engines: 2, Replay: "tcp://127.0.0.255:5558"}, "kv@127.0.1.0@m tcp://127.0.1.0:5558"},
		{Command{Connect: connect, Engines: 2, Replay: "tcp://127.0.0.1:5558", Ranks: true}, "kv@127.0.0.1@m tcp://127.0.0.1:5559"},
		{Command{Connect: connect, Engines: 1, Replay: "tcp://host.example:5558"}, "kv@host.example@m tcp://host.example:5558"},
		{Command{Connect: connect, Engines: 2, Replay: "tcp://host.example:5558"}, "kv@sim-1@m tcp://host.example:5559"},
		{Command{Connect: connect, Engines: 1, Replay: "tcp://[::1]:5558"}, "kv@::1@m tcp://[::1]:5558"},
		{Command{Connect: connect, Engines: 2, Replay: "tcp://[::1]:5558"}, "kv@sim-1@m tcp://[::1]:5559"},
		{Command{Connect: connect, Engines: 1, Replay: "tcp://*:5558"}, "kv@sim-0@m tcp://*:5558"},
		{Command{Connect: connect, Engines: 1, Replay: "tcp://0.0.0.0:5558"}, "kv@sim-0@m tcp://0.0.0.0:5558"},
		{Command{Connect: connect, Engines: 2, Replay: "tcp://127.0.0.1:5558", Name: "e"}, "kv@e-1@m tcp://127.0.0.1:5559"},
		{Command{Connect: connect, Engines: 2, Name: "e", Ranks: true}, "kv@e@m "},
		{Command{Bind: "tcp://*:5557", Engines: 2, Replay: "tcp://127.0.0.1:5657"}, " tcp://127.0.0.1:5658"},
	} {
		tt.cmd.BlockSize, tt.cmd.Model = 16, "m"
		configs, err := tt.cmd.configs()
		if err != nil {
			t.Errorf("%+v: %v", tt.cmd, err)
			continue
		}
		last := configs[len(configs)-1]
		if got := last.Topic + " " + last.Replay; got != tt.want {
			t.Errorf("%+v: got %q, want %q", tt.cmd, got, tt.want)
		}
		if topic := last.Topic; topic != "" && !strings.HasPrefix(topic, "kv@"+tt.cmd.worker(tt.cmd.Engines-1)+"@") {
			t.Errorf("%+v: got worker name %s", tt.cmd, tt.cmd.worker(tt.cmd.Engines-1))
		}
	}
}
