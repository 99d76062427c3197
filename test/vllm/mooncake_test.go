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
	"strconv"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
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
  - {name: e, model: llama, pools: [store], sources: [{connect: "tcp://127.0.0.1:%d", replay: "tcp://127.0.0.1:%d"}]}
`, port, at.publish, at.replay)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	k := startRelay(t, "--config", config)
	m := &mooncakeWorld{t: t, engine: e, relay: k, port: port, row: &scenario{t: t, name: "Mooncake store", engine: e, trust: make(map[string]int)}}
	table.mu.Lock()
	table.rows = append(table.rows, m.row)
	table.mu.Unlock()

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
		w.answered(p, m.request(p))
	}
	if m.loaded == 0 {
		t.Error("the engine has loaded nothing from the store")
	}
	m.row.note = fmt.Sprintf("%d loaded from the store, which had %d blocks", m.loaded, len(m.stored()))
}

// mooncakeWorld is an engine, its store, and kvcast.
type mooncakeWorld struct {
	t      *testing.T
	engine *engine
	relay  *relay
	port   int
	row    *scenario
	loaded int // requests for which blocks were loaded
}

// stored returns the hashes that events have of the blocks that the store's keys name.
func (m *mooncakeWorld) stored() (hashes []uint64) {
	m.t.Helper()
	for _, key := range mooncakeKeys(m.port) {
		if len(key) < 16 {
			continue
		}
		hash, err := strconv.ParseUint(key[len(key)-16:], 16, 64)
		if err != nil {
			m.t.Fatalf("key %q: %v", key, err)
		}
		hashes = append(hashes, hash)
	}
	slices.Sort(hashes)
	return hashes
}

// request waits until kvcast has the blocks of the store and of the engine, asks it for a prompt, sends it to the engine, and compares.
func (m *mooncakeWorld) request(p prompt) []uint32 {
	m.t.Helper()
	state := ""
	defer func() {
		if m.t.Failed() {
			m.t.Logf("kvcast beside the store: %s", state)
		}
	}()
	harness.WaitFor(m.t, func() bool {
		device, pool := m.held()
		wantDevice, wantPool := m.engine.hashes(), m.stored()
		state = fmt.Sprintf("device memory: %s; store: %s", difference(wantDevice, device), difference(wantPool, pool))
		return slices.Equal(wantDevice, device) && slices.Equal(wantPool, pool)
	})
	answer, err := m.relay.client.MatchPrefix(harness.Context(m.t), &kvcastv1.MatchPrefixRequest{
		Model: "llama", Prompts: []*kvcastv1.Prompt{{TokenIds: p.Tokens, LoraName: p.LoRA, CacheSalt: p.Salt, ExcludeLastToken: true}},
	})
	if err != nil {
		m.t.Fatal(err)
	}
	var predicted prediction
	inPool := 0
	for _, match := range answer.GetPrompts()[0].GetMatches() {
		device, _ := m.relay.prediction([]*kvcastv1.PrefixMatch{match})
		predicted.tokens = device.tokens
		for _, pool := range match.GetPools() {
			inPool = int(pool.GetTokens())
			predicted.tokens, predicted.trust, predicted.reasons = max(predicted.tokens, inPool), pool.GetTrust(), pool.GetReasons()
		}
	}
	out := m.engine.generate(p)[0]
	m.row.want = []kvcastv1.Trust{predicted.trust}
	m.row.compare(p, predicted, out.Cached)
	if predicted.tokens != out.Cached {
		m.t.Errorf("request %d (%d tokens, adapter %q, salt %q): kvcast said %d tokens, of which the store has %d; the engine has reused %d, of which %d were in device memory", m.row.requests,
			len(p.Tokens), p.LoRA, p.Salt, predicted.tokens, inPool, out.Cached, out.Device)
	}
	if out.Cached > out.Device {
		m.loaded++
	}
	return out.Tokens
}

// held returns the hashes of the blocks that kvcast has of the engine's device memory, and of the store.
func (m *mooncakeWorld) held() (device, pool []uint64) {
	m.t.Helper()
	return m.relay.hashesOf("e", kvcastv1.Tier_TIER_DEVICE), m.relay.hashesOf("store", kvcastv1.Tier_TIER_EXTERNAL)
}
