package console_test

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvcast/kvcast/internal/console"
	"github.com/kvcast/kvcast/internal/feed"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/server/access"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	routersToken = "0123456789abcdef-router"
	getStatus    = "/console/rpc/kvcast.v1.RouterEventService/GetStatus"
)

// serve starts a console, and returns its URL.
func serve(t *testing.T, cfg console.Config) string {
	t.Helper()
	c := console.New(cfg)
	s := httptest.NewServer(c)
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
		c.Close()
	})
	return s.URL
}

// start starts a server with a worker that holds a block, and a console on loopback.
func start(t *testing.T, cfg server.Config) (*harness.Instance, string) {
	t.Helper()
	i := harness.StartInstance(t, harness.InstanceConfig{Server: cfg})
	i.AddWorker(feed.Worker{Name: "w<b>1", Model: "m"})
	i.Batch("w<b>1", enginetest.Stored(7))
	return i, serve(t, console.Config{Server: i.Server, Loopback: true})
}

// answer is a response with its body.
type answer struct {
	*http.Response
	body string
}

func do(t *testing.T, r *http.Request) answer {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{response, string(body)}
}

func request(t *testing.T, method, url, body string, headers ...string) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if method == http.MethodPost {
		r.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	return r
}

func get(t *testing.T, url string) answer {
	t.Helper()
	return do(t, request(t, http.MethodGet, url, ""))
}

func post(t *testing.T, url, body string, headers ...string) answer {
	t.Helper()
	return do(t, request(t, http.MethodPost, url, body, headers...))
}

var (
	referenced = regexp.MustCompile(`(?:src|href)="(/[^"]+)"`)
	imported   = regexp.MustCompile(`from '\./([^']+)'`)
	inline     = regexp.MustCompile(`<script(?:[^>]* src=)?|<style| style=| on[a-z]+=`)
)

// TestPageHasItsFiles follows the references of the page and the imports of its modules.
func TestPageHasItsFiles(t *testing.T) {
	t.Parallel()
	_, url := start(t, server.Config{})
	page := get(t, url+"/")
	if page.StatusCode != http.StatusOK || !strings.HasPrefix(page.Header.Get("Content-Type"), "text/html") {
		t.Fatalf("got %s, %s", page.Status, page.Header.Get("Content-Type"))
	}
	for _, found := range inline.FindAllString(page.body, -1) {
		if !strings.HasSuffix(found, "src=") {
			t.Errorf("the page has %q, which its policy forbids", found)
		}
	}
	var queue []string
	for _, m := range referenced.FindAllStringSubmatch(page.body, -1) {
		queue = append(queue, m[1])
	}
	seen := make(map[string]bool)
	for len(queue) > 0 {
		path := queue[0]
		queue = queue[1:]
		if seen[path] {
			continue
		}
		seen[path] = true
		file := get(t, url+path)
		if file.StatusCode != http.StatusOK {
			t.Errorf("%s: got %s", path, file.Status)
		}
		if strings.HasSuffix(path, ".js") && !strings.HasPrefix(file.Header.Get("Content-Type"), "text/javascript") {
			t.Errorf("%s: got type %q, which browsers do not run", path, file.Header.Get("Content-Type"))
		}
		for _, m := range imported.FindAllStringSubmatch(file.body, -1) {
			queue = append(queue, "/console/"+m[1])
		}
	}
	entries, err := os.ReadDir("static")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if name := e.Name(); name != "index.html" && !seen["/console/"+name] {
			t.Errorf("nothing refers to %s", name)
		}
	}
	if missing := get(t, url+"/console/missing.js"); missing.StatusCode != http.StatusNotFound {
		t.Errorf("a missing file: got %s", missing.Status)
	}
}

func TestFilesAreNotSentTwice(t *testing.T) {
	t.Parallel()
	_, url := start(t, server.Config{})
	tag := get(t, url+"/").Header.Get("ETag")
	again := do(t, request(t, http.MethodGet, url+"/", "", "If-None-Match", tag))
	if again.StatusCode != http.StatusNotModified || again.body != "" {
		t.Errorf("got %s and %d bytes", again.Status, len(again.body))
	}
}

func TestAnswersHaveSecurityHeaders(t *testing.T) {
	t.Parallel()
	_, url := start(t, server.Config{})
	for _, a := range []answer{get(t, url+"/"), get(t, url+"/console/app.js"), get(t, url+"/console/none"), post(t, url+getStatus, "{}"), post(t, url+getStatus, "no JSON")} {
		policy := a.Header.Get("Content-Security-Policy")
		for _, want := range []string{"default-src 'none'", "script-src 'self';", "style-src 'self';", "frame-ancestors 'none'", "require-trusted-types-for 'script'"} {
			if !strings.Contains(policy, want) {
				t.Errorf("%s: the policy %q does not have %s", a.Request.URL, policy, want)
			}
		}
		if strings.Contains(policy, "unsafe") {
			t.Errorf("%s: got policy %q", a.Request.URL, policy)
		}
		for header, want := range map[string]string{"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin"} {
			if got := a.Header.Get(header); got != want {
				t.Errorf("%s: %s is %q, want %q", a.Request.URL, header, got, want)
			}
		}
	}
}

// TestAnswersAreThoseOfGRPC compares the two ways to call.
func TestAnswersAreThoseOfGRPC(t *testing.T) {
	t.Parallel()
	i, url := start(t, server.Config{})
	client, inspection := i.Client(t), kvcastv1.NewInspectionServiceClient(i.Dial(t))
	ctx := t.Context()
	prompts := []*kvcastv1.Prompt{{TokenIds: []uint32{1, 2, 3, 4}}, {BlockHashes: []uint64{7}}}
	for _, test := range []struct {
		method  string
		request proto.Message
		answer  proto.Message
		call    func() (proto.Message, error)
	}{
		{"RouterEventService/GetStatus", &kvcastv1.GetStatusRequest{}, &kvcastv1.GetStatusResponse{},
			func() (proto.Message, error) { return client.GetStatus(ctx, &kvcastv1.GetStatusRequest{}) }},
		{"RouterEventService/ListWorkers", &kvcastv1.ListWorkersRequest{}, &kvcastv1.ListWorkersResponse{},
			func() (proto.Message, error) { return client.ListWorkers(ctx, &kvcastv1.ListWorkersRequest{}) }},
		{"RouterEventService/MatchPrefix", &kvcastv1.MatchPrefixRequest{Prompts: prompts}, &kvcastv1.MatchPrefixResponse{},
			func() (proto.Message, error) {
				return client.MatchPrefix(ctx, &kvcastv1.MatchPrefixRequest{Prompts: prompts})
			}},
		{"InspectionService/ListEntries", &kvcastv1.ListEntriesRequest{Limit: 1}, &kvcastv1.ListEntriesResponse{},
			func() (proto.Message, error) {
				return inspection.ListEntries(ctx, &kvcastv1.ListEntriesRequest{Limit: 1})
			}},
	} {
		t.Run(test.method, func(t *testing.T) {
			want, err := test.call()
			if err != nil {
				t.Fatal(err)
			}
			text, err := protojson.Marshal(test.request)
			if err != nil {
				t.Fatal(err)
			}
			got := post(t, url+"/console/rpc/kvcast.v1."+test.method, string(text))
			if got.StatusCode != http.StatusOK {
				t.Fatalf("got %s: %s", got.Status, got.body)
			}
			if err := protojson.Unmarshal([]byte(got.body), test.answer); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, test.answer, protocmp.Transform()); diff != "" {
				t.Errorf("(-gRPC +console):\n%s", diff)
			}
			if proto.Size(test.answer) == 0 {
				t.Error("the answer is empty, so that nothing is compared")
			}
		})
	}
}

func TestBadRequestsAreRefused(t *testing.T) {
	t.Parallel()
	_, url := start(t, server.Config{})
	for name, test := range map[string]struct {
		request *http.Request
		status  int
		want    string
	}{
		"a form":                {request(t, http.MethodPost, url+getStatus, "a=b", "Content-Type", "application/x-www-form-urlencoded"), http.StatusUnsupportedMediaType, "application/json"},
		"a stream by form":      {request(t, http.MethodPost, url+"/console/stream", "", "Content-Type", "text/plain"), http.StatusUnsupportedMediaType, "application/json"},
		"another site":          {request(t, http.MethodPost, url+getStatus, "{}", "Sec-Fetch-Site", "cross-site"), http.StatusForbidden, "another site"},
		"another origin":        {request(t, http.MethodPost, url+getStatus, "{}", "Origin", "http://evil.example.com"), http.StatusForbidden, "another site"},
		"no method":             {request(t, http.MethodPost, url+"/console/rpc/kvcast.v1.RouterEventService/Nothing", "{}"), http.StatusNotFound, "no unary method"},
		"a streaming method":    {request(t, http.MethodPost, url+"/console/rpc/kvcast.v1.RouterEventService/Subscribe", "{}"), http.StatusNotFound, "no unary method"},
		"a method that changes": {request(t, http.MethodPost, url+"/console/rpc/kvcast.v1.WorkerService/RegisterWorker", "{}"), http.StatusNotFound, "no unary method"},
		"no JSON":               {request(t, http.MethodPost, url+getStatus, "{"), http.StatusBadRequest, "kvcast.v1.GetStatusRequest"},
		"unknown field":         {request(t, http.MethodPost, url+getStatus, `{"color": 1}`), http.StatusBadRequest, "color"},
		"too large":             {request(t, http.MethodPost, url+getStatus, strings.Repeat(" ", 5<<20)), http.StatusBadRequest, "4194304 bytes"},
		"many objects":          {request(t, http.MethodPost, url+"/console/rpc/kvcast.v1.RouterEventService/MatchPrefix", `{"prompts":[`+strings.Repeat("{},", 300)+`{}]}`), http.StatusBadRequest, "302 objects: want at most 256"},
		"refused by server":     {request(t, http.MethodPost, url+"/console/rpc/kvcast.v1.InspectionService/ListEntries", `{"limit": 101}`), http.StatusBadRequest, `"reason":"INVALID_ARGUMENT"`},
		"GET":                   {request(t, http.MethodGet, url+getStatus, ""), http.StatusMethodNotAllowed, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got := do(t, test.request)
			if got.StatusCode != test.status || !strings.Contains(got.body, test.want) {
				t.Errorf("got %s, %s; want %d and %q", got.Status, got.body, test.status, test.want)
			}
		})
	}
}

// TestOtherNamesAreRefused covers sites whose name resolves to the address of a port that needs no token.
func TestOtherNamesAreRefused(t *testing.T) {
	t.Parallel()
	i, url := start(t, server.Config{})
	open, withTokens := serve(t, console.Config{Server: i.Server}), serve(t, console.Config{Server: i.Server, About: console.About{Token: true}})
	const yes, no = http.StatusOK, http.StatusMisdirectedRequest
	for host, want := range map[string]struct{ loopback, open int }{
		"localhost:9464": {yes, yes}, "127.0.0.1": {yes, yes}, "127.0.0.2:1": {yes, yes}, "[::1]:9464": {yes, yes}, "LOCALHOST": {yes, yes},
		"10.0.0.1": {no, yes}, "[2001:db8::1]:9464": {no, yes},
		"evil.example.com": {no, no}, "localhost.example.com:9464": {no, no},
	} {
		for url, want := range map[string]int{url: want.loopback, open: want.open, withTokens: yes} {
			for _, r := range []*http.Request{request(t, http.MethodGet, url+"/", ""), request(t, http.MethodPost, url+getStatus, "{}")} {
				r.Host = host
				if got := do(t, r); got.StatusCode != want {
					t.Errorf("%s%s at %s: got %s, want %d", url, r.URL.Path, host, got.Status, want)
				}
			}
		}
	}
}

// fakeServer answers each call with a message.
type fakeServer struct{ answer proto.Message }

func (s fakeServer) Call(_ context.Context, _ string, _ server.Caller, decode func(proto.Message) error) (proto.Message, error) {
	return s.answer, decode(&kvcastv1.GetStatusRequest{})
}

// TestAnswersThatAreNotReadAreBounded has clients that send requests and read no answer.
func TestAnswersThatAreNotReadAreBounded(t *testing.T) {
	t.Parallel()
	large := &kvcastv1.MatchPrefixResponse{Position: &kvcastv1.Position{Epoch: strings.Repeat("e", 16<<20)}} // more than sockets buffer
	url := serve(t, console.Config{Server: fakeServer{large}, Loopback: true})
	var refused answer
	for range 10 {
		conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", strings.TrimPrefix(url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		if err := request(t, http.MethodPost, url+getStatus, "{}").Write(conn); err != nil {
			t.Fatal(err)
		}
		response, err := http.ReadResponse(bufio.NewReader(conn), nil) //nolint:bodyclose // the connection is closed
		if err != nil {
			t.Fatal(err)
		}
		if response.StatusCode == http.StatusOK {
			continue // without its body
		}
		body, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		refused = answer{response, string(body)}
		break
	}
	if refused.Response == nil || refused.StatusCode != http.StatusTooManyRequests || !strings.Contains(refused.body, "67108864 bytes") {
		t.Errorf("10 answers of 16 MiB that are not read: got %+v", refused)
	}
}

func TestTokensAreNeededUnlessOnLoopback(t *testing.T) {
	t.Parallel()
	tokens, err := access.ParseTokens("tokens", []byte("router "+routersToken))
	if err != nil {
		t.Fatal(err)
	}
	i, loopback := start(t, server.Config{Access: access.List{Tokens: tokens}})
	elsewhere := serve(t, console.Config{Server: i.Server})
	for name, test := range map[string]struct {
		url     string
		headers []string
		want    int
	}{
		"loopback":    {loopback, nil, http.StatusOK},
		"forwarded":   {loopback, []string{"X-Forwarded-For", "192.0.2.1"}, http.StatusUnauthorized},
		"none":        {elsewhere, nil, http.StatusUnauthorized},
		"wrong":       {elsewhere, []string{"Authorization", "Bearer " + routersToken + "0"}, http.StatusUnauthorized},
		"right":       {elsewhere, []string{"Authorization", "Bearer " + routersToken}, http.StatusOK},
		"right, form": {elsewhere, []string{"Authorization", "bearer " + routersToken}, http.StatusOK},
	} {
		t.Run(name, func(t *testing.T) {
			if got := post(t, test.url+getStatus, "{}", test.headers...); got.StatusCode != test.want {
				t.Errorf("a call: got %s, %s", got.Status, got.body)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			r := request(t, http.MethodPost, test.url+"/console/stream", "{}", test.headers...).WithContext(ctx)
			client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
			response, err := client.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = response.Body.Close() }()
			if response.StatusCode != test.want {
				t.Errorf("the stream: got %s", response.Status)
			}
			first := make([]byte, 12)
			if _, err := io.ReadFull(response.Body, first); err != nil || test.want == http.StatusOK != bytes.Equal(first, []byte("event: about")) {
				t.Errorf("the stream begins with %q: %v", first, err)
			}
		})
	}
}
