package vllm_test

import (
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// fileHashes returns the hashes that events have of the blocks in files of vLLM's offloading connector.
func fileHashes(t *testing.T, root string) (hashes []uint64) {
	t.Helper()
	err := filepath.WalkDir(root, func(_ string, entry fs.DirEntry, err error) error {
		if digest, ok := strings.CutSuffix(entry.Name(), ".bin"); ok && err == nil {
			hashes = append(hashes, hashOf(t, digest))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(hashes)
	return hashes
}

// TestSharedFiles has two engines that offload blocks to the same files, and load what the other has stored. kvcast, which reads what both announce, must have exactly the
// blocks of the files, and predict what each engine loads: also after it has reset its own cache, and after kvcast has restarted.
func TestSharedFiles(t *testing.T) {
	testclass.Peers(t)
	for locality, pool := range map[string]string{"": "workers://disk", "REMOTE": "workers://external?max_age=1h"} {
		t.Run(pool, func(t *testing.T) { sharedFiles(t, locality, pool) })
	}
}

func sharedFiles(t *testing.T, locality, pool string) {
	root := t.TempDir()
	text := fmt.Sprintf("workers:\n  - {name: files, model: llama, sources: [{connect: %q}]}\n", pool)
	var engines []*engine
	for i := range 2 {
		at := freePorts(t)
		engines = append(engines, startEngine(t, engineConfig{
			Model: "llama", Events: at.events(), Offload: 2 << 20, Files: map[string]string{"root_dir": root, "locality": locality},
			Adapters: map[string]string{"a": "adapter-a"}, Args: args(60, map[string]any{"enable_lora": true, "max_loras": 2, "max_lora_rank": 8}), env: []string{"PYTHONHASHSEED=0"},
		}))
		text += fmt.Sprintf("  - {name: e%d, model: llama, pools: [files], sources: [{connect: \"tcp://127.0.0.1:%d\", replay: \"tcp://127.0.0.1:%d\"}]}\n", i, at.publish, at.replay)
	}
	config := filepath.Join(t.TempDir(), "kvcast.yaml")
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	k := startRelay(t, "--config", config)
	w := newPoolWorld(t, "shared files, "+pool, k, "files", engines...)
	w.stored = func() []uint64 { return fileHashes(t, root) }
	w.all = true      // also in host memory
	w.step = func() { // an engine says with its next step what was stored
		for _, e := range engines {
			e.generate(prompt{Tokens: []uint32{1}, MaxTokens: 1})
		}
	}

	load := newWorkload(90)
	load.salts, load.loras = []string{"", "s"}, []string{"", "", "a"}
	random := rand.New(rand.NewPCG(90, 2))
	for n := range requests(40) {
		if n%20 == 10 {
			k.stop()
			k.start()
		}
		e := engines[random.IntN(2)]
		if random.IntN(3) == 0 {
			e.reset()
		}
		p := load.next()
		if len(p.Tokens)%blockSize == 0 { // a connector loads the block of the last token, if it has it
			p.Tokens = p.Tokens[:len(p.Tokens)-1]
		}
		load.answered(p, w.request(e, p))
	}
	if w.loaded == 0 {
		t.Error("the engines have loaded nothing from the files")
	}
	w.row.note = fmt.Sprintf("%d loaded from host memory or files, which had %d blocks", w.loaded, len(w.stored()))
}
