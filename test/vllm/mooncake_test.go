package vllm_test

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/harness"
)

// mooncakePackage is where make routers prepares Mooncake.
const mooncakePackage = "../../bin/routers/mooncake/package"

// startMooncake starts a Mooncake master, and returns the port of its HTTP server and the file that tells the engine of it.
func startMooncake(t *testing.T) (port int, file string) {
	t.Helper()
	master := filepath.Join(mooncakePackage, "mooncake/mooncake_master")
	if _, err := os.Stat(master); err != nil {
		t.Skipf("%s is missing: run make routers to prepare it", master)
	}
	rpc, port := harness.FreePort(t), harness.FreePort(t)
	cmd := exec.CommandContext(t.Context(), master, fmt.Sprint("-rpc_port=", rpc), fmt.Sprint("-metrics_port=", port), "-rpc_address=127.0.0.1", "-metrics_host=127.0.0.1")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	text, err := json.Marshal(map[string]any{
		"metadata_server": "P2PHANDSHAKE", "master_server_address": fmt.Sprint("127.0.0.1:", rpc), "protocol": "tcp", "global_segment_size": 64 << 20, "local_buffer_size": 16 << 20,
	})
	if err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(t.TempDir(), "mooncake.json")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	harness.WaitFor(t, func() bool { return mooncakeKeys(port) != nil })
	return port, file
}

// mooncakeKeys returns the keys that a master has; nil if it does not answer.
func mooncakeKeys(port int) []string {
	response, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/get_all_keys", port)) //nolint:noctx // of a process that the test ends
	if err != nil {
		return nil
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return nil
	}
	return strings.Split(string(text), "\n")
}

// TestMooncakeStore has an engine that stores its blocks in a Mooncake store and loads them from there. kvcast, which reads the master's list and the engine's events, must have
// exactly the blocks of the store's keys, and predict what the engine loads: also after it has reset its own cache, so that it loads all, and
// after kvcast has restarted.
func TestMooncakeStore(t *testing.T) {
	testclass.Peers(t)
	port, file := startMooncake(t)
	at := freePorts(t)
	directory, err := filepath.Abs(mooncakePackage)
	if err != nil {
		t.Fatal(err)
	}
	e := startEngine(t, engineConfig{
		Model: "llama", Events: at.events(), Mooncake: directory, Adapters: map[string]string{"a": "adapter-a"},
		Args: args(60, map[string]any{"enable_lora": true, "max_loras": 2, "max_lora_rank": 8}), env: []string{"MOONCAKE_CONFIG_PATH=" + file, "VLLM_HOST_IP=127.0.0.1", "PYTHONHASHSEED=0"},
	})
	config := filepath.Join(t.TempDir(), "kvcast.yaml")
	text := fmt.Sprintf(`workers:
  - {name: store, model: llama, sources: [{connect: "mooncake://127.0.0.1:%d"}]}
  - {name: e0, model: llama, pools: [store], sources: [{connect: "tcp://127.0.0.1:%d", replay: "tcp://127.0.0.1:%d"}]}
`, port, at.publish, at.replay)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	k := startRelay(t, "--config", config)
	m := newPoolWorld(t, "Mooncake store", k, "store", e)
	m.stored = func() []uint64 { return mooncakeHashes(t, port) }

	w := newWorkload(80)
	w.salts, w.loras = []string{"", "s"}, []string{"", "", "a"}
	random := rand.New(rand.NewPCG(80, 2))
	for n := range requests(40) {
		if n%20 == 10 {
			k.stop()
			k.start()
		}
		if random.IntN(3) == 0 {
			e.reset()
			e.generate(prompt{Tokens: w.tokens(2 * blockSize), MaxTokens: 1}) // with the event
		}
		p := w.next()
		if len(p.Tokens)%blockSize == 0 { // a connector loads the block of the last token, if it has it
			p.Tokens = p.Tokens[:len(p.Tokens)-1]
		}
		w.answered(p, m.request(e, p))
	}
	if m.loaded == 0 {
		t.Error("the engine has loaded nothing from the store")
	}
	m.row.note = fmt.Sprintf("%d loaded from the store, which had %d blocks", m.loaded, len(m.stored()))
}

// mooncakeHashes returns the hashes that events have of the blocks that a master's keys name.
func mooncakeHashes(t *testing.T, port int) (hashes []uint64) {
	t.Helper()
	for _, key := range mooncakeKeys(port) {
		if len(key) >= 16 {
			hashes = append(hashes, hashOf(t, key))
		}
	}
	slices.Sort(hashes)
	return hashes
}
