package main_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
)

func TestUsageErrorsAreOneLine(t *testing.T) {
	for _, tt := range []struct {
		args   string
		status int
		says   string
	}{
		{"serve --worker name=x", 2, `connect: "" is not allowed: want tcp://HOST:PORT`},
		{"serve --worker nam=x", 2, "want KEY=VALUE with a key among block_size, chunk_size, clear, connect"},
		{"serve --worker name=x,connect=tcp://h:1,dp_size=z", 2, `dp_size: "z" is not allowed: want 1 to 1024`},
		{"serve --bind tcp://x", 2, "want tcp://ADDRESS:PORT"},
		{"serve --bind tcp://*:5557,engine=foo", 2, "want vllm, sglang, trtllm, kvbm, llm-d-sim, lmcache, lmcache-coordinator, mooncake or workers"},
		{"serve --bind tcp://127.0.0.1:0 --batch-timeout 16s", 2, "want 0s to 15s"},
		{"serve --bind tcp://127.0.0.1:0 --batch-max-blocks 0", 2, "want 1 to 16384"},
		{"serve --bind tcp://127.0.0.1:0 --journal-max-bytes 5k", 2, "such as 64MiB"},
		{"serve --bind tcp://127.0.0.1:0 --listen localhost:99999", 2, "want HOST:PORT or :PORT"},
		{"subscribe --addr 127.0.0.1:1", 1, "start one with kvcast serve"},
		{"subscribe --after 5", 2, "want EPOCH:SEQ"},
		{"subscribe --after :5 --from latest", 2, "can't be used together"},
		{"subscribe --from foo", 2, `--from must be one of "snapshot","earliest","latest"`},
		{"subscribe --addr http://localhost:50051", 2, "want HOST:PORT, without a scheme"},
		{"subscribe --addr 127.0.0.1:1,127.0.0.1:1", 1, "start one with kvcast serve"},
		{"status --addr 127.0.0.1:1,", 2, "or several separated by commas"},
		{"match", 2, "want --tokens, --tokens-file, --tokens-hashes or --block-hashes"},
		{"match --tokens 1,x", 2, `--tokens: "x" is not allowed: want a number of 0 to 4294967295`},
		{"match --tokens 4294967296", 2, `--tokens: "4294967296" is not allowed`},
		{"match --tokens ,", 2, "--tokens: no number is given"},
		{"match --tokens [1,-2]", 2, "--tokens: the JSON is not allowed: want an array of token ids"},
		{"match --tokens []", 2, "--tokens: the array is empty"},
		{"match --tokens-file no-such-file", 2, "--tokens-file: open no-such-file"},
		{"match --tokens 1 --tokens-hashes 2", 2, "can't be used together"},
		{"match --tokens-hashes 0xg", 2, `--tokens-hashes: "0xg" is not allowed`},
		{"match --tokens-hashes 1 --lora a", 2, "--tokens-hashes: --lora, --salt and --eagle are not allowed"},
		{"match --block-hashes 18446744073709551616", 2, "want a number of 0 to 18446744073709551615"},
		{"match --tokens 1 --after 5", 2, "want EPOCH:SEQ"},
		{"match --tokens 1 --addr 127.0.0.1:1", 1, "start one with kvcast serve"},
		{"serve --worker name=a,name=b", 2, "name is given twice"},
		{"simulate --blocks 0", 2, "want 1 or more"},
		{"simulate --engines 0", 2, "want 1 to 256"},
		{"decode no-such-file", 1, "no-such-file"},
		{"bogus", 2, "see kvcast --help"},
	} {
		t.Run(tt.args, func(t *testing.T) {
			t.Parallel()
			got := kvcast(t, nil, strings.Fields(tt.args)...)
			if got.status != tt.status || !strings.Contains(got.err, tt.says) || !strings.HasPrefix(got.err, "kvcast: ") {
				t.Errorf("got status %d and %q; want %d and a line that says %q", got.status, got.err, tt.status, tt.says)
			}
			if strings.Count(got.err, "\n") != 1 {
				t.Errorf("got %q, want one line", got.err)
			}
		})
	}
}

func TestAddressInUse(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	_, s := engine(t)
	taken := s.Address()
	got := kvcast(t, nil, "serve", "--bind", "tcp://127.0.0.1:*", "--listen", taken, "--admin", "")
	if got.status != 1 || !strings.Contains(got.err, "address already in use; choose another address with --listen") {
		t.Errorf("got status %d and %q", got.status, got.err)
	}
	p := serve(t, "--bind", "tcp://127.0.0.1:*")
	port := p.Endpoint()[strings.LastIndexByte(p.Endpoint(), ':'):]
	got = kvcast(t, nil, "serve", "--bind", "tcp://127.0.0.1"+port, "--listen", "127.0.0.1:0", "--admin", "")
	if got.status != 1 || !strings.Contains(got.err, "address already in use") || !strings.Contains(got.err, port) {
		t.Errorf("a port in use: got status %d and %q", got.status, got.err)
	}
}

func TestHelpNamesEveryCommand(t *testing.T) {
	for _, args := range [][]string{nil, {"--help"}} {
		got := kvcast(t, nil, args...)
		for _, command := range []string{"serve", "subscribe", "replay", "snapshot", "match", "workers", "status", "top", "simulate", "decode", "demo", "version", "completion", "man"} {
			if !strings.Contains(got.out, "  "+command+" ") {
				t.Errorf("kvcast %v: no %s in:\n%s", args, command, got.out)
			}
		}
		if got.status != 0 {
			t.Errorf("kvcast %v: status %d, want 0", args, got.status)
		}
	}
}

func TestVersion(t *testing.T) {
	got := kvcast(t, nil, "version")
	if !regexp.MustCompile(`^kvcast \S+ \((libzmq 4\.\d+\.\d+|without libzmq)\)\n$`).MatchString(got.out) {
		t.Errorf("got %q", got.out)
	}
}

// TestDecodeVectors runs the golden payloads through the command.
func TestDecodeVectors(t *testing.T) {
	testclass.Process(t)
	testclass.WithoutRace(t)
	dir := "../../internal/wire/testdata/vectors"
	raw, err := os.ReadFile(filepath.Join(dir, "index.json"))
	if err != nil {
		t.Fatal(err)
	}
	var index struct {
		Vectors []struct {
			Name   string `json:"name"`
			File   string `json:"file"`
			Error  string `json:"error"`
			Expect any    `json:"expect"`
		} `json:"vectors"`
	}
	if err := json.Unmarshal(raw, &index); err != nil {
		t.Fatal(err)
	}
	if len(index.Vectors) < 50 {
		t.Fatalf("%d vectors, want all", len(index.Vectors))
	}
	for _, v := range index.Vectors {
		t.Run(v.Name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(dir, v.File)
			payload, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			want, status := v.Expect, 0
			if v.Error != "" {
				want, status = map[string]any{"error": v.Error}, 1
			}
			for _, got := range []result{kvcast(t, nil, "decode", file), kvcast(t, bytes.NewReader(payload), "decode", "-")} {
				var object any
				if err := json.Unmarshal([]byte(got.out), &object); err != nil {
					t.Fatalf("%v in %q", err, got.out)
				}
				if diff := cmp.Diff(want, object); diff != "" || got.status != status || got.err != "" {
					t.Errorf("status %d, want %d; standard error %q; object (-want +got):\n%s", got.status, status, got.err, diff)
				}
			}
		})
	}
}

func TestDecodeRecording(t *testing.T) {
	testclass.Process(t)
	testclass.WithoutRace(t)
	got := kvcast(t, nil, "decode", filepath.Join(captures, "vllm-map.jsonl.gz"))
	if n := strings.Count(got.out, "\n"); n != 400 || got.status != 0 {
		t.Errorf("got %d lines and status %d, want 400 and 0", n, got.status)
	}
	for line := range strings.Lines(got.out) {
		if !strings.HasPrefix(line, `{"ts":`) || !json.Valid([]byte(line)) {
			t.Fatalf("got line %q", line)
		}
	}
	// The end marker of a replay is not a batch.
	got = kvcast(t, nil, "decode", filepath.Join(captures, "vllm-array.replay.jsonl.gz"))
	if n := strings.Count(got.out, "\n"); n != 200 || got.status != 1 || !strings.HasSuffix(got.out, "{\"error\": \"truncated\"}\n") {
		t.Errorf("replay: got %d lines and status %d, want 200 and 1", n, got.status)
	}
}

func TestSubscribeAsJSONAndResume(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	p, s := engine(t)
	for n := range uint64(5) {
		publish(t, p,
			wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{1<<63 + n}, Tokens: []uint32{1, 2}, BlockSize: 2},
			wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{n}})
	}
	type line struct {
		Epoch   string `json:"epoch"`
		Seq     string `json:"seq"`
		Worker  string `json:"worker"`
		Control string `json:"control"`
		Event   struct {
			EventID string `json:"event_id"`
			DPRank  *int   `json:"dp_rank"`
			Tier    string `json:"tier"`
			Stored  *struct {
				BlockHashes []string `json:"block_hashes"`
			} `json:"stored"`
			Removed     any `json:"removed"`
			WorkerAdded any `json:"worker_added"`
		} `json:"event"`
	}
	read := func(args ...string) (lines []line, got result) {
		got = kvcast(t, nil, append([]string{"subscribe", "--addr", s.Address(), "-o", "json"}, args...)...)
		for text := range strings.Lines(got.out) {
			var l line
			if err := json.Unmarshal([]byte(text), &l); err != nil {
				t.Fatalf("%v in %q", err, text)
			}
			lines = append(lines, l)
		}
		return lines, got
	}
	// The fourth event is the first event of entry 3. Entries are printed whole.
	lines, got := read("--count", "4", "--from", "earliest")
	if len(lines) != 6 || lines[0].Control != "accepted" || lines[1].Event.WorkerAdded == nil || lines[5].Seq != "3" {
		t.Fatalf("got %+v", lines)
	}
	if l := lines[2]; l.Worker != "w" || l.Event.EventID != "2" || l.Event.Tier != "TIER_DEVICE" || *l.Event.DPRank != 0 ||
		l.Event.Stored.BlockHashes[0] != "9223372036854775808" {
		t.Errorf("got %+v", l)
	}
	resume := regexp.MustCompile(`--after (\S+)`).FindStringSubmatch(got.err)
	if resume == nil || resume[1] != lines[0].Epoch+":3" {
		t.Fatalf("got hint %q, want the position after entry 3", got.err)
	}
	lines, _ = read("--count", "1", "--after", resume[1])
	if len(lines) != 3 || lines[1].Seq != "4" {
		t.Errorf("resumed: got %+v, want entry 4", lines)
	}
	if _, got := read("--after", ":9999"); got.status != 1 || !strings.Contains(got.err, "OUT_OF_RANGE: ") {
		t.Errorf("beyond the newest: got status %d and %q", got.status, got.err)
	}
}

// TestSubscribeResumesAfterConnectionAge uses a server that limits the age of connections.
func TestSubscribeResumesAfterConnectionAge(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	p, s := engine(t, "--subscribers-max-connection-age", "1s", "--subscribers-max-connection-age-grace", "1s")
	block := uint64(0)
	publishOne := func() {
		block++
		publish(t, p, wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{block}, Tokens: []uint32{1, 2}, BlockSize: 2})
	}
	e := runExample(t, program(t), "subscribe", "--addr", s.Address(), "--from", "earliest", "-o", "json")
	last := uint64(0)
	for more := 20; more > 0; {
		var l struct {
			Seq, Control string
		}
		if err := json.Unmarshal([]byte(e.next()), &l); err != nil {
			t.Fatal(err)
		}
		if l.Control != "" {
			continue
		}
		seq, err := strconv.ParseUint(l.Seq, 10, 64)
		if err != nil || seq != last+1 {
			t.Fatalf("entry %q after %d", l.Seq, last)
		}
		if last = seq; last > block { // entry 1 adds the worker
			publishOne()
		}
		if strings.Contains(e.errOut.String(), "resuming after ") {
			more--
		}
	}
	if !strings.Contains(e.errOut.String(), "UNAVAILABLE: ") {
		t.Errorf("standard error:\n%s", &e.errOut)
	}
}

// TestSimulatedRanksFormOneWorker simulates three engines that are ranks of one worker.
func TestSimulatedRanksFormOneWorker(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	s := serve(t, "--bind", "tcp://127.0.0.1:*")
	got := kvcast(t, nil, "simulate", "--connect", s.Endpoint(), "--engines", "3", "--ranks", "--wait", "--batches", "5", "--rate", "0", "-o", "json")
	if got.status != 0 {
		t.Fatalf("simulate: status %d: %s", got.status, got.err)
	}
	for rank, line := range strings.Split(strings.TrimSpace(got.out), "\n")[3:6] {
		var ended struct {
			Blocks int `json:"blocks"`
		}
		if err := json.Unmarshal([]byte(line), &ended); err != nil {
			t.Fatal(err)
		}
		s.AwaitSample(fmt.Sprintf(`kvcast_index_blocks{dp_rank="%d",tier="device",worker="sim"} %d`, rank, ended.Blocks))
	}
}

// TestEndWithStdin ends a command with its standard input, so that it does not outlive a parent that is killed.
func TestEndWithStdin(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	got := kvcast(t, strings.NewReader(""), "--end-with-stdin", "simulate", "--bind", "tcp://127.0.0.1:*", "--wait")
	if got.status != 0 || !strings.Contains(got.out, "published 0 batches") {
		t.Errorf("got status %d and %q", got.status, got.out)
	}
}

func TestDemo(t *testing.T) {
	t.Parallel()
	got := kvcast(t, nil, "demo")
	if got.status != 0 || strings.Count(got.out, "\nok      ") != 4 || strings.Contains(got.out, "FAILED") {
		t.Errorf("status %d, want 0 and four successful checks:\n%s%s", got.status, got.out, got.err)
	}
	if !strings.Contains(got.out, "grpcurl -plaintext -d") {
		t.Error("the output has no grpcurl command")
	}
}

func TestDemoOfARestart(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	got := kvcast(t, nil, "demo", "--restart")
	if got.status != 0 || strings.Count(got.out, "\nok      ") != 3 || strings.Contains(got.out, "FAILED") {
		t.Errorf("status %d, want 0 and three successful checks:\n%s%s", got.status, got.out, got.err)
	}
}

func TestDemoOfACluster(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	got := kvcast(t, nil, "demo", "--cluster")
	if got.status != 0 || strings.Count(got.out, "\nok      ") != 3 || strings.Contains(got.out, "FAILED") {
		t.Errorf("status %d, want 0 and three successful checks:\n%s%s", got.status, got.out, got.err)
	}
}
