package console_test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/kvcast/kvcast/internal/console"
	"github.com/kvcast/kvcast/internal/feed"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

// recorder records an answer, and takes deadlines as a connection does.
type recorder struct{ *httptest.ResponseRecorder }

func (recorder) SetReadDeadline(time.Time) error  { return nil }
func (recorder) SetWriteDeadline(time.Time) error { return nil }

// messagesOf returns an empty request and an empty response of a unary method; ok is false if there is no such method.
func messagesOf(service, method string) (request, response proto.Message, ok bool) {
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service))
	s, isService := d.(protoreflect.ServiceDescriptor)
	if err != nil || !isService {
		return nil, nil, false
	}
	m := s.Methods().ByName(protoreflect.Name(method))
	if m == nil || m.IsStreamingClient() || m.IsStreamingServer() {
		return nil, nil, false
	}
	in, inErr := protoregistry.GlobalTypes.FindMessageByName(m.Input().FullName())
	out, outErr := protoregistry.GlobalTypes.FindMessageByName(m.Output().FullName())
	if inErr != nil || outErr != nil {
		return nil, nil, false
	}
	return in.New().Interface(), out.New().Interface(), true
}

// waits reports whether the server waits for something before it answers a request.
func waits(request proto.Message, newest uint64) bool {
	switch r := request.(type) {
	case *kvcastv1.MatchPrefixRequest:
		return r.GetAfter().GetSeq() > newest
	case *kvcastv1.ListSharedPrefixesRequest:
		return r.GetModel() != "m" // for a scan of another model than the last one
	}
	return false
}

// FuzzRPC calls methods. An answer is the method's response in JSON. Any other request is refused with the status of a client's
// error and a short text in JSON, and one that is no request of the method's always.
func FuzzRPC(f *testing.F) {
	const events, inspection = "kvcast.v1.RouterEventService", "kvcast.v1.InspectionService"
	add := func(service, method string, bodies ...string) {
		for _, body := range bodies {
			f.Add(service, method, "localhost:9464", "application/json", []byte(body))
		}
	}
	add(events, "GetStatus", "{}", "", "{", "[]", "null", `{"color": 1}`, `{}{}`, "\xff", `{"`+strings.Repeat("<", 10_000)+`": 1}`)
	add(events, "ListWorkers", `{}`, `{"filter": {"models": ["m", "`+strings.Repeat("<", 10_000)+`"]}}`,
		`{"filter": {"workers": ["w<b>1", "\u0000"], "tiers": ["TIER_DEVICE", 9, "x"]}}`)
	add(events, "ListSubscribers", `{}`)
	add(events, "LookupBlocks", `{"block_hashes": [7, "18446744073709551615"]}`, `{"blockHashes": ["7"], "tokens_hashes": [7]}`,
		`{"block_hashes": [-1]}`)
	add(events, "MatchPrefix", `{"prompts": [{"token_ids": [1, 2, 3, 4]}, {"block_hashes": [7]}]}`,
		`{"prompts":[`+strings.Repeat("{},", 300)+`{}]}`,
		`{"prompts": [{"token_ids": [`+strings.Repeat("9", 10_000)+`]}]}`,
		`{"prompts": [{"tokens_hashes": [1]}], "model": "m", "limit": 1, "after": {"epoch": "`+strings.Repeat("<", 10_000)+`"}}`)
	add(inspection, "ListEntries", `{"limit": 100}`, `{"limit": 101}`, `{"worker": "w<b>1"}`)
	add(inspection, "ListIncidents", `{"kinds": ["INCIDENT_KIND_GAP"], "limit": 5}`, `{"kinds": [0]}`,
		`{"kinds": ["`+strings.Repeat("K", 10_000)+`"]}`)
	add(inspection, "GetHistory", `{"worker": "w"}`)
	add(inspection, "GetChain", `{"worker": "w<b>1", "dp_rank": 0, "block_hash": 7}`)
	add(inspection, "ListSharedPrefixes", `{"model": "m"}`, `{"model": "m", "limit": 100000}`)
	add(events, "Subscribe", `{}`)
	add("kvcast.v1.WorkerService", "RegisterWorker", `{}`)
	add("a/b", strings.Repeat("\xff", 5000), `{}`)
	f.Add(events, "GetStatus", "evil.example.com", "application/json", []byte(`{}`))
	f.Add(events, "GetStatus", "[::1]", "application/json; charset=utf-8", []byte(`{}`))
	f.Add(events, "GetStatus", "127.0.0.1", "text/plain", []byte(`{}`))

	i := harness.StartInstance(f, harness.InstanceConfig{})
	i.AddWorker(feed.Worker{Name: "w<b>1", Model: "m"})
	i.Batch("w<b>1", enginetest.Stored(7))
	newest := i.Journal.Bounds().Newest
	c := console.New(console.Config{Server: i.Server, Loopback: true})
	f.Cleanup(c.Close)
	f.Fuzz(func(t *testing.T, service, method, host, contentType string, body []byte) {
		if others := []string{"", ".", "..", "/"}; slices.Contains(others, service) || slices.Contains(others, method) {
			t.Skip("http.ServeMux takes it for another path")
		}
		request, response, isMethod := messagesOf(service, method)
		isRequest := isMethod && protojson.Unmarshal(body, request) == nil
		if isRequest && waits(request, newest) {
			t.Skip("it waits")
		}
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost,
			"/console/rpc/"+url.PathEscape(service)+"/"+url.PathEscape(method), bytes.NewReader(body))
		r.Host = host
		r.Header.Set("Content-Type", contentType)
		w := recorder{httptest.NewRecorder()}
		c.ServeHTTP(w, r)
		got := w.Body.Bytes()
		if w.Header().Get("Content-Type") != "application/json" || w.Header().Get("Content-Security-Policy") == "" {
			t.Errorf("headers %v", w.Header())
		}
		if w.Code == http.StatusOK {
			if !isRequest {
				t.Fatalf("%s.%s answers to %q", service, method, body)
			}
			if err := protojson.Unmarshal(got, response); err != nil {
				t.Errorf("%v in %s", err, got)
			}
			return
		}
		var problem struct{ Code, Message string }
		err := json.Unmarshal(got, &problem)
		if err != nil || w.Code < 400 || w.Code > 499 || problem.Code == "" || problem.Message == "" || len(got) > 4<<10 {
			t.Errorf("status %d with %d bytes: %.1000s", w.Code, len(got), got)
		}
	})
}
