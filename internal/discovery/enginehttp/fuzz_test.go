package enginehttp_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/discovery/enginehttp"
	"github.com/kvcast/kvcast/internal/feed"
)

// FuzzAnswer reads answers of engines. A worker that an engine reports is valid, at ports of the engine's own host, and is
// otherwise as configured. Any other answer leaves it unchanged, or is an error of one short line.
func FuzzAnswer(f *testing.F) {
	const host, ok = "127.0.0.1", http.StatusOK
	const descriptor = `{"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 6000, "block_size": 64, "dp_size": 2,
		"replay_endpoint_port_base": 6100}`
	for _, body := range []string{
		`{"0": ` + vllm("tcp://*:6000", `"tcp://*:6100"`) + `}`,
		`{"1": ` + vllm("tcp://[::]:6001", "null") + `, "0": ` + vllm("tcp://127.0.0.1:6000", "null") + `}`,
		`{"3": ` + vllm("tcp://0.0.0.0:6003", `""`) + `}`, `{"1024": ` + vllm("tcp://*:6000", "null") + `}`,
		`{"0": ` + vllm("tcp://*:0", "null") + `}`, `{"0": ` + vllm("ipc:///tmp/x", "null") + `}`,
		`{"0": ` + vllm("tcp://169.254.169.254:1", "null") + `}`,
		`{"0": ` + vllm("tcp://*:6000", `"tcp://h:1"`) + `}`, `{"0": ` + vllm("tcp://*\\n:6000", "null") + `}`,
		`{"0": {"publisher": "null\n"}}`, `{"-1": {}}`,
		`{"a\nb": {}}`, `{"0": null}`, `{"` + strings.Repeat("9", 10_000) + `": {}}`, `{}`, `[]`, `null`, `<html>`, ``,
	} {
		f.Add(true, ok, "OK", []byte(body))
	}
	for _, change := range []struct{ from, to string }{
		{}, {`"*"`, `"127.0.0.1"`}, {`"*"`, `"[::]"`}, {`"*"`, `"h"`}, {"6000", "65535"}, {"6000", "0"}, {"6100", "-1"},
		{"6100", "0"}, {`"dp_size": 2`, `"dp_size": 2000000000`},
		{`"dp_size": 2`, `"dp_size": 0`}, {`"block_size": 64`, `"block_size": 65537`}, {`"zmq"`, `"null"`},
		{"6000", strings.Repeat("9", 10_000)}, {descriptor, "null"}, {descriptor, `"text"`},
	} {
		f.Add(false, ok, "OK", []byte(sglang(strings.Replace(descriptor, change.from, change.to, 1))))
	}
	f.Add(false, ok, "OK", []byte(`{"served_model_name": "m"}`))
	f.Add(true, http.StatusNotFound, "Not Found", []byte("404 page not found"))
	f.Add(false, http.StatusNotFound, "Not Found", []byte(`{"detail":"Not Found"}`))
	f.Add(true, http.StatusUnauthorized, "\x1b[31m", []byte("{}"))
	f.Add(false, http.StatusFound, strings.Repeat("long ", 300), []byte(sglang(descriptor)))
	f.Fuzz(func(t *testing.T, isVLLM bool, status int, reason string, body []byte) {
		defer enginehttp.SetTransport(func(r *http.Request) (*http.Response, error) {
			return &http.Response{Status: fmt.Sprint(status, " ", reason), StatusCode: status, Request: r,
				Body: io.NopCloser(bytes.NewReader(body))}, nil
		})()
		engine := feed.EngineSGLang
		if isVLLM {
			engine = feed.EngineVLLM
		}
		w := config.Worker{
			Name: "w", HTTP: "http://" + host + ":8000", Labels: map[string]string{"zone": "a"}, Consolidate: feed.ConsolidateDedup,
			Sources: []config.Source{{Engine: engine, Connect: "tcp://127.0.0.1:5557", DPSize: 3, Copies: config.CopiesCounted}},
		}
		got, reported, err := enginehttp.Ask(t.Context(), w)
		if err != nil {
			if text := err.Error(); strings.ContainsFunc(text, unicode.IsControl) || len(text) > 4000 || !strings.Contains(text, w.HTTP) {
				t.Errorf("an error that is not one short line with %s: %.5000q", w.HTTP, text)
			}
			return
		}
		if status != ok && status != http.StatusNotFound {
			t.Errorf("status %d: reported: %t", status, reported)
		}
		if !reported {
			if diff := cmp.Diff(w, got); diff != "" {
				t.Errorf("an engine that reports nothing (-want +got):\n%s", diff)
			}
			return
		}
		if err := (config.Config{Workers: []config.Worker{got}}).Validate(); err != nil {
			t.Error(err)
		}
		var told map[string]struct{ Endpoint string }
		if isVLLM && json.Unmarshal(body, &told) == nil {
			for rank, at := range told {
				e, _ := config.ParseEndpoint(at.Endpoint, true)
				ip, err := netip.ParseAddr(e.Address)
				if e.Address != "*" && e.Address != host && (err != nil || !ip.IsUnspecified() && ip.Unmap().String() != host) {
					t.Errorf("rank %s is elsewhere: %s", rank, at.Endpoint)
				}
			}
		}
		source := got.Sources[0]
		for _, r := range source.Endpoints() {
			for _, endpoint := range []string{r.Connect, r.Replay} {
				if e, ok := config.ParseEndpoint(endpoint, false); endpoint != "" &&
					(!ok || e.Transport != config.TransportTCP || e.Address != host) {
					t.Errorf("rank %d is at %q, want %s", r.Rank, endpoint, host)
				}
			}
		}
		reportable := cmp.Options{
			cmpopts.IgnoreFields(config.Worker{}, "Model", "BlockSize"),
			cmpopts.IgnoreFields(config.Source{}, "Connect", "Replay", "FirstRank", "DPSize", "Ranks"),
		}
		if diff := cmp.Diff(w, got, reportable); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		again, _, err := enginehttp.Ask(t.Context(), w)
		if diff := cmp.Diff(got, again); err != nil || diff != "" {
			t.Errorf("asked again: error %v (-want +got):\n%s", err, diff)
		}
	})
}
