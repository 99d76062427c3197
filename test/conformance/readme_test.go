package conformance_test

import (
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// readmeAddresses are the addresses in the READMEs of clients.
var readmeAddresses = regexp.MustCompile(`(localhost|127\.0\.0\.1):50051`)

// readmePrograms returns the programs in a README: its blocks of code in a language, with the address of a server.
func readmePrograms(t *testing.T, file, language, address string) []string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var programs []string
	for _, m := range regexp.MustCompile("(?ms)^```"+language+"\n(.*?)^```$").FindAllStringSubmatch(string(text), -1) {
		programs = append(programs, readmeAddresses.ReplaceAllLiteralString(m[1], address))
	}
	if len(programs) == 0 {
		t.Fatalf("%s has no program", file)
	}
	return programs
}

// serveTokens starts a server with a worker of the model m that holds the tokens 1 to 4, stores a further block ten times a second, and returns
// its address.
func serveTokens(t *testing.T) string {
	t.Helper()
	i := harness.StartInstance(t, harness.InstanceConfig{})
	i.AddWorker(feed.Worker{Name: "w", Model: "m", BlockSize: 2})
	store := func(hashes []uint64, contents []uint64) {
		i.Batch("w", wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: hashes, TokensHashes: contents, BlockSize: 2})
	}
	store([]uint64{1, 2}, client.TokensHashes([]uint32{1, 2, 3, 4}, 2, "", ""))
	c := i.Client(t)
	harness.WaitFor(t, func() bool {
		status, err := c.GetStatus(t.Context(), &kvcastv1.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return status.GetBlocks() == 2
	})
	end, ended := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() {
		close(end)
		<-ended
	})
	go func() {
		defer close(ended)
		ticker := time.NewTicker(100 * time.Millisecond)
		defer ticker.Stop()
		for n := uint64(3); ; n++ {
			select {
			case <-ticker.C:
				store([]uint64{n}, []uint64{n})
			case <-end:
				return
			}
		}
	}()
	return i.Target
}

func TestPythonReadme(t *testing.T) {
	testclass.Peers(t)
	t.Parallel()
	python := inPython(t)
	for _, program := range readmePrograms(t, pythonFolder+"/README.md", "python", serveTokens(t)) {
		if out := command(t, pythonFolder, python, "-c", program); out == "" {
			t.Errorf("this prints nothing:\n%s", program)
		}
	}
}
