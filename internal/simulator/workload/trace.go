package workload

import (
	"bufio"
	"bytes"
	"compress/gzip"
	_ "embed" // the conversation trace
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/kvcast/kvcast/internal/simulator/blockpool"
)

// TraceBlock is the number of tokens that an id of a trace represents.
const TraceBlock = 512

// Trace is the requests that a service received, ordered by time.
type Trace struct{ Requests []TraceRequest }

// TraceRequest is a request of a trace.
type TraceRequest struct {
	// At is the request's time since the start of the trace.
	At time.Duration
	// Input and Output are the numbers of tokens of its prompt and of its output.
	Input, Output int
	// IDs represent the prompt, each TraceBlock tokens, the last at most as many. Equal ids after
	// equal ids represent equal tokens.
	IDs []uint64
}

// ConversationTrace returns the conversation trace of Mooncake's FAST'25 paper:
// 12,031 requests of one hour, github.com/kvcache-ai/Mooncake, Apache-2.0.
func ConversationTrace() (*Trace, error) {
	return ReadTrace("conversation", bytes.NewReader(conversationTrace))
}

//go:embed traces/conversation_trace.jsonl.gz
var conversationTrace []byte

// OpenTrace reads the trace in a file, which may be compressed with gzip.
func OpenTrace(path string) (*Trace, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read trace: %w", err)
	}
	t, err := ReadTrace(path, f)
	return t, errors.Join(err, f.Close())
}

// maxTraceLine bounds a line, in bytes: a prompt of about 50 million tokens.
const maxTraceLine = 1 << 20

// ReadTrace reads a trace in Mooncake's format, which may be compressed with gzip: one request per
// line, an object with timestamp (milliseconds), input_length and output_length (tokens) and
// hash_ids (one id per 512 tokens of the prompt, and one for the rest). Times never decrease.
// Errors name the file and the line.
func ReadTrace(name string, r io.Reader) (*Trace, error) {
	in := bufio.NewReader(r)
	lines := bufio.NewScanner(in)
	if magic, _ := in.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(in)
		if err != nil {
			return nil, fmt.Errorf("read trace: %s: %w", name, err)
		}
		lines = bufio.NewScanner(z)
	}
	lines.Buffer(nil, maxTraceLine)
	t := &Trace{}
	n := 0
	for lines.Scan() {
		n++
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		req, err := parseTraceLine(lines.Bytes())
		if err == nil && len(t.Requests) > 0 && req.At < t.Requests[len(t.Requests)-1].At {
			err = fmt.Errorf("timestamp: %d comes before that of the previous request: want them in order", req.At.Milliseconds())
		}
		if err != nil {
			return nil, fmt.Errorf("read trace: %s: line %d: %w", name, n, err)
		}
		t.Requests = append(t.Requests, req)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read trace: %s: line %d: %w", name, n+1, err)
	}
	if n == 0 || len(t.Requests) == 0 {
		return nil, fmt.Errorf("read trace: %s: it has no request", name)
	}
	return t, nil
}

// maxTraceTime bounds times, in milliseconds: more than a year.
const maxTraceTime = 1 << 36

func parseTraceLine(line []byte) (TraceRequest, error) {
	var l struct {
		Timestamp *int64    `json:"timestamp"`
		Input     *int      `json:"input_length"`
		Output    *int      `json:"output_length"`
		IDs       *[]uint64 `json:"hash_ids"`
	}
	if err := json.Unmarshal(line, &l); err != nil {
		var wrong *json.UnmarshalTypeError
		switch {
		case errors.As(err, &wrong) && wrong.Field != "":
			return TraceRequest{}, fmt.Errorf("%s: %s is not allowed: want whole numbers of 0 or more", wrong.Field, wrong.Value)
		case errors.As(err, &wrong):
			return TraceRequest{}, fmt.Errorf("a JSON %s, want an object", wrong.Value)
		}
		return TraceRequest{}, fmt.Errorf("no JSON object: %w", err)
	}
	for _, field := range []struct {
		name    string
		missing bool
	}{
		{"timestamp", l.Timestamp == nil},
		{"input_length", l.Input == nil},
		{"output_length", l.Output == nil},
		{"hash_ids", l.IDs == nil},
	} {
		if field.missing {
			return TraceRequest{}, fmt.Errorf("%s is missing", field.name)
		}
	}
	switch {
	case *l.Timestamp < 0 || *l.Timestamp > maxTraceTime:
		return TraceRequest{}, fmt.Errorf("timestamp: %d is not allowed: want 0 to %d milliseconds", *l.Timestamp, int64(maxTraceTime))
	case *l.Input < 1:
		return TraceRequest{}, fmt.Errorf("input_length: %d is not allowed: want 1 or more", *l.Input)
	case *l.Output < 0:
		return TraceRequest{}, fmt.Errorf("output_length: %d is not allowed: want 0 or more", *l.Output)
	}
	if want := (*l.Input-1)/TraceBlock + 1; len(*l.IDs) != want {
		return TraceRequest{}, fmt.Errorf("hash_ids: %d of them for %d tokens: want %d, one for each %d tokens",
			len(*l.IDs), *l.Input, want, TraceBlock)
	}
	return TraceRequest{
		At:    time.Duration(*l.Timestamp) * time.Millisecond,
		Input: *l.Input, Output: *l.Output, IDs: *l.IDs,
	}, nil
}

// Prompt returns the tokens of the prompt, which depend on the ids only: prompts with equal first
// ids have equal first tokens, at any block size.
func (r TraceRequest) Prompt() []uint32 {
	prompt := make([]uint32, r.Input)
	for i := range prompt {
		prompt[i] = traceToken(r.IDs[i/TraceBlock], uint64(i%TraceBlock))
	}
	return prompt
}

// outputID is a bit that is set in the ids of generated tokens only: the ids of prompts count from
// 0.
const outputID = 1 << 63

// traceToken returns one token of an id.
func traceToken(id, at uint64) uint32 {
	return uint32(blockpool.SplitMix64(blockpool.SplitMix64(id)^at) % vocabulary)
}
