package dynamo_test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// fields are those of a query that matter. A pointer is nil if the field is absent or null.
type fields struct {
	TokenIDs     *[]uint32 `json:"token_ids,omitempty"`
	BlockHashes  *[]int64  `json:"block_hashes,omitempty"`
	ModelName    *string   `json:"model_name,omitempty"`
	RoutingGroup *string   `json:"routing_group,omitempty"`
	LoRAName     *string   `json:"lora_name,omitempty"`
	CacheSalt    *string   `json:"cache_salt,omitempty"`
}

// maxErrorBytes bounds an answer with an error.
const maxErrorBytes = 4 << 10

// wantRefused fails the test unless an answer is an error of the client, in JSON, and short.
func wantRefused(t *testing.T, status int, body string) {
	t.Helper()
	var answer struct{ Error string }
	err := json.Unmarshal([]byte(body), &answer)
	if err != nil || status < 400 || status > 499 || answer.Error == "" || len(body) > maxErrorBytes {
		t.Errorf("status %d with %d bytes: %.1000s", status, len(body), body)
	}
}

// FuzzQuery sends queries. An answer has no more than the prompt has, in each tier at least what the tiers before it have, and is
// the same for the fields that matter alone. Any other request is refused.
func FuzzQuery(f *testing.F) {
	paths := []string{"/query", "/query_by_hash", "/query_tiered_by_hash", "/register"}
	hashes := signed(tokensHashes("", ""))
	for _, body := range []string{
		`{"token_ids":[1,2,3,4,5,6,7,8,9],"block_hashes":` + hashes + `,"model_name":"m"}`,
		`{"token_ids":[1,2,3,4],"block_hashes":` + hashes + `,"model_name":"m","routing_group":"blue","lora_name":null,"tenant_id":"x"}`,
		`{"token_ids":[1,2,3,4,5,6,7,8],"model_name":"adapted","lora_name":"l","cache_salt":"s"}`,
		`{"token_ids":[],"block_hashes":[],"model_name":"m"}`, `{"token_ids":[1],"block_hashes":[-1,0],"MODEL_NAME":"m"}`,
		`{"token_ids":[1],"block_hashes":[1],"model_name":"` + strings.Repeat("<", 1000) + `"}`,
		`{"token_ids":[1],"block_hashes":[1],"model_name":"m","routing_group":"a\nb\u001b"}`,
		`{"token_ids":[1],"block_hashes":[1],"model_name":"m","cache_salt":""}`,
		`{"token_ids":[4294967296],"block_hashes":[9223372036854775808],"model_name":"m"}`,
		`{"token_ids":[` + strings.Repeat("9", 10_000) + `],"block_hashes":[1.5],"model_name":"m"}`, `{"model_name":"m"}`,
		`{"token_ids":[1],"block_hashes":[1]}`, `{"token_ids":null,"model_name":1}`,
		`{"token_ids":[1],"token_ids":{},"model_name":"m"}`, `[]`, `null`, `{"token_ids":[1`, ``, "\xff", `{"model_name":"\ud800"}`,
	} {
		for path := range paths {
			f.Add(path, "application/json", []byte(body))
		}
	}
	f.Add(0, "application/x-www-form-urlencoded", []byte("token_ids=1"))
	f.Add(0, "application/cloudevents+json; charset=utf-8", []byte(`{"token_ids":[1,2],"model_name":"m"}`))
	f.Add(0, strings.Repeat("a/\x01", 1000), []byte(`{}`))
	h := newHandler(newWorld().Index, isReady)
	send := func(t *testing.T, path, contentType string, body []byte) (int, string) {
		t.Helper()
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, bytes.NewReader(body))
		r.Header.Set("Content-Type", contentType)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w.Code, strings.TrimSpace(w.Body.String())
	}
	f.Fuzz(func(t *testing.T, path int, contentType string, body []byte) {
		at := paths[uint(path)%uint(len(paths))]
		status, got := send(t, at, contentType, body)
		if status != http.StatusOK {
			wantRefused(t, status, got)
			return
		}
		var q fields
		if err := json.Unmarshal(body, &q); err != nil {
			t.Fatalf("%v, and the answer is %s", err, got)
		}
		same, err := json.Marshal(q)
		if err != nil {
			t.Fatal(err)
		}
		again, gotAgain := send(t, at, "application/json", same)
		if diff := cmp.Diff(got, gotAgain); again != status || diff != "" {
			t.Errorf("for %s: status %d (-want +got):\n%s", same, again, diff)
		}
		switch at {
		case "/query":
			checkScores(t, got, len(*q.TokenIDs)/2)
		case "/query_by_hash":
			checkScores(t, got, len(*q.BlockHashes))
		default:
			checkTiers(t, got, len(*q.BlockHashes))
		}
	})
}

// checkScores checks an answer to a prompt of some blocks of two tokens.
func checkScores(t *testing.T, body string, blocks int) {
	t.Helper()
	var answer struct {
		Scores    map[string]map[string]int
		Instances map[string]struct {
			LongestMatched int `json:"longest_matched"`
			GPU, CPU, Disk int
			DP             map[string]int
		}
	}
	if err := json.Unmarshal([]byte(body), &answer); err != nil {
		t.Fatalf("%v in %s", err, body)
	}
	for id, in := range answer.Instances {
		best := 0
		for rank, tokens := range in.DP {
			if best = max(best, tokens); answer.Scores[id][rank] != tokens {
				t.Errorf("rank %s of %s has %d tokens, and the score %d", rank, id, tokens, answer.Scores[id][rank])
			}
		}
		if in.GPU != best || in.CPU < in.GPU || in.Disk < in.CPU || in.LongestMatched != in.Disk || in.Disk > 2*blocks ||
			in.Disk%2 != 0 {
			t.Errorf("%s has %+v of %d blocks", id, in, blocks)
		}
	}
	if len(answer.Scores) > len(answer.Instances) {
		t.Errorf("scores of other workers: %s", body)
	}
}

// checkTiers checks an answer to a prompt of some blocks.
func checkTiers(t *testing.T, body string, blocks int) {
	t.Helper()
	var answer struct {
		BlockSize int `json:"block_size"`
		Tiered    struct {
			Device    struct{ Scores [][2]any }
			LowerTier [][2]any `json:"lower_tier"`
		}
	}
	if err := json.Unmarshal([]byte(body), &answer); err != nil {
		t.Fatalf("%v in %s", err, body)
	}
	total := make(map[string]float64) // blocks by worker and rank
	add := func(key, n any) {
		text, err := json.Marshal(key)
		count, ok := n.(float64)
		if total[string(text)] += count; err != nil || !ok || count < 1 || total[string(text)] > float64(blocks) {
			t.Errorf("%s has %v of %d blocks: %s", text, n, blocks, body)
		}
	}
	for _, score := range answer.Tiered.Device.Scores {
		add(score[0], score[1])
	}
	for _, tier := range answer.Tiered.LowerTier {
		for _, hit := range tier[1].(map[string]any)["hits"].([]any) {
			add(hit.([]any)[0], hit.([]any)[1])
		}
	}
	if answer.BlockSize != 2 {
		t.Errorf("block size %d, want 2", answer.BlockSize)
	}
}

// FuzzWorkers asks for the workers that parameters of a URL select: those of them that have the model and the group.
func FuzzWorkers(f *testing.F) {
	for _, query := range []string{
		"", "model_name=m", "model_name=m&routing_group=blue", "routing_group=default", "model_name=none", "model_name=",
		"model_name=%zz", "routing_group=a;b", "model_name=m&model_name=adapted", "%00&=&&",
	} {
		f.Add(query)
	}
	type worker struct {
		ID    uint64 `json:"instance_id"`
		Model string `json:"model_name"`
		Group string `json:"routing_group"`
	}
	h := newHandler(newWorld().Index, isReady)
	ask := func(t *testing.T, query string) (all []worker) {
		t.Helper()
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/workers", nil)
		r.URL.RawQuery = query
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if err := json.Unmarshal(w.Body.Bytes(), &all); err != nil || w.Code != http.StatusOK || all == nil {
			t.Fatalf("status %d, error %v: %s", w.Code, err, w.Body)
		}
		return all
	}
	f.Fuzz(func(t *testing.T, query string) {
		params, _ := url.ParseQuery(query)
		want := []worker{}
		for _, w := range ask(t, "") {
			if (!params.Has("model_name") || w.Model == params.Get("model_name")) &&
				(!params.Has("routing_group") || w.Group == params.Get("routing_group")) {
				want = append(want, w)
			}
		}
		if diff := cmp.Diff(want, ask(t, query)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}
