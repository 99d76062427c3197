package dynamo

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"strings"

	"github.com/kvcast/kvcast/internal/budget"
)

// queryRequest is the body of /query, /query_by_hash and /query_tiered_by_hash. A pointer is nil if the field is absent or
// null. Other fields are ignored, among them tenant_id.
type queryRequest struct {
	TokenIDs     *[]uint32 `json:"token_ids"`
	BlockHashes  *[]int64  `json:"block_hashes"` // tokens hashes of the blocks, as signed numbers
	ModelName    *string   `json:"model_name"`
	RoutingGroup *string   `json:"routing_group"`
	LoRAName     *string   `json:"lora_name"`
	CacheSalt    *string   `json:"cache_salt"`
}

// receive returns the body of a request, and reserves its capacity of what is being received, also if there is an error.
func (h *handler) receive(w http.ResponseWriter, r *http.Request) (body []byte, err error) {
	if r.ContentLength == 0 { // such as of GET
		return nil, nil
	}
	limited := http.MaxBytesReader(w, r.Body, maxBodyBytes)
	for {
		if len(body) == cap(body) {
			larger := max(4096, 2*cap(body))
			if all := int(r.ContentLength) + 1; all > cap(body) { // one byte more, for a Read that returns the end
				larger = min(larger, all)
			}
			switch err := h.reading.Reserve(budget.ClientOf(r.RemoteAddr), int64(larger-cap(body))); {
			case errors.Is(err, budget.ErrShare):
				return body, failf(http.StatusServiceUnavailable, "the bodies that this address is sending take more than %d bytes, which is the limit: send fewer at a time", maxReading/2)
			case err != nil:
				return body, failf(http.StatusServiceUnavailable, "the bodies that are being received take all memory for that: try again")
			}
			body = append(make([]byte, 0, larger), body...)
		}
		n, err := limited.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		switch tooLarge := new(http.MaxBytesError); {
		case err == io.EOF:
			return body, nil
		case errors.As(err, &tooLarge):
			return body, failf(http.StatusRequestEntityTooLarge, "the body has more than %d bytes, which is the limit", tooLarge.Limit)
		case err != nil:
			return body, failf(http.StatusBadRequest, "read the body: %w", err)
		}
	}
}

// readQuery reads a request whose required field is TokenIDs or BlockHashes. The statuses of errors are those of Dynamo's
// indexer.
func readQuery(r *http.Request, required string) (*queryRequest, error) {
	if media, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || media != "application/json" && !strings.HasSuffix(media, "+json") {
		return nil, failf(http.StatusUnsupportedMediaType, "content type %.100q is not allowed: want application/json", r.Header.Get("Content-Type"))
	}
	body, err := io.ReadAll(r.Body) // it has been received
	if err != nil {
		return nil, failf(http.StatusBadRequest, "read the body: %w", err)
	}
	if n := bytes.Count(body, []byte(",")); n > maxElements {
		return nil, failf(http.StatusRequestEntityTooLarge, "the body has %d elements, and the limit is %d", n, maxElements)
	}
	q := new(queryRequest)
	if err := json.Unmarshal(body, q); err != nil {
		if wrong := new(json.UnmarshalTypeError); errors.As(err, &wrong) {
			if wrong.Field == "" {
				return nil, failf(http.StatusUnprocessableEntity, "the body is a %s: want an object", wrong.Value)
			}
			return nil, failf(http.StatusUnprocessableEntity, "field %s is not allowed to be a %.100s: want %s", wrong.Field, wrong.Value, wantedType(wrong.Field))
		}
		return nil, failf(http.StatusBadRequest, "the body is not JSON: %w", err)
	}
	switch {
	case q.ModelName == nil:
		return nil, missing("model_name")
	case required == "token_ids" && q.TokenIDs == nil, required == "block_hashes" && q.BlockHashes == nil:
		return nil, missing(required)
	}
	return q, nil
}

func missing(field string) error {
	return failf(http.StatusUnprocessableEntity, "field %s is missing: want %s", field, wantedType(field))
}

func wantedType(field string) string {
	switch strings.SplitN(field, ".", 2)[0] {
	case "token_ids":
		return "a list of numbers from 0 to 4294967295"
	case "block_hashes":
		return "a list of signed 64-bit numbers"
	}
	return "a string"
}

func (q *queryRequest) group() string {
	if q.RoutingGroup == nil {
		return DefaultGroup
	}
	return *q.RoutingGroup
}

// text returns the string that a field has; empty if it has none.
func text(field *string) string {
	if field == nil {
		return ""
	}
	return *field
}
