// Package conformance plays scripts that every client of kvcast must pass: what servers send, faults included, and what the client
// must then ask and report. README.md describes the format of the scripts, and what a client's runner must do.
package conformance

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Script is a file of scripts.
type Script struct {
	// Name is the name of the file without its extension.
	Name string `json:"-"`
	// About says what must be true, for people.
	About string `json:"about"`
	// Servers is the number of servers; 0 means 1.
	Servers int `json:"servers"`
	// TLS enables TLS on the servers. Token is the bearer token that they require; empty means none.
	TLS   bool   `json:"tls"`
	Token string `json:"token"`
	// ClientID is what the client calls itself.
	ClientID string `json:"client_id"`
	// Calls are what the client is asked to do, one after the other, with one client. The servers add their addresses.
	Calls []json.RawMessage `json:"calls"`
	// Streams are the Subscribe streams that the client must open, in order.
	Streams []Stream `json:"streams"`
	// Answers are the unary calls that the client must make, in order.
	Answers []Answer `json:"answers"`
	// MatchStreams are the MatchPrefixes streams that the client must open, in order.
	MatchStreams []MatchStream `json:"match_streams"`
	// Want are the lines that the client must report, in any order if they are Unordered.
	Want      []json.RawMessage `json:"want"`
	Unordered bool              `json:"unordered"`
}

// Stream is a Subscribe stream.
type Stream struct {
	// Server is the index of the server that must receive the request.
	Server int `json:"server"`
	// Expect is the SubscribeRequest that the client must send.
	Expect json.RawMessage `json:"expect"`
	// NotBefore is the shortest time in milliseconds since the end of the stream before.
	NotBefore int `json:"not_before_ms"`
	// Pause is the time in milliseconds before each message.
	Pause int `json:"pause_ms"`
	// Send are the SubscribeResponses.
	Send []json.RawMessage `json:"send"`
	// End is how the stream ends; nil: it stays open until the client cancels it.
	End *End `json:"end"`
}

// Answer is the answer to a unary call.
type Answer struct {
	// Method is the name of the method.
	Method string `json:"method"`
	// Server is the index of the server that must receive the request.
	Server int `json:"server"`
	// Expect is the request that the client must send.
	Expect json.RawMessage `json:"expect"`
	// Response is the response, if there is no End.
	Response json.RawMessage `json:"response"`
	End      *End            `json:"end"`
}

// MatchStream is a MatchPrefixes stream.
type MatchStream struct {
	Server int `json:"server"`
	// Together is the number of requests that must arrive before the first is answered; 0 means 1.
	Together int `json:"together"`
	// Answers are the answers, each to the first request that it expects.
	Answers []MatchAnswer `json:"answers"`
}

// MatchAnswer is the answer to a request of a MatchPrefixes stream.
type MatchAnswer struct {
	// Expect is the MatchPrefixesRequest that the client must send, without its id.
	Expect json.RawMessage `json:"expect"`
	// Response is the MatchPrefixResponse.
	Response json.RawMessage `json:"response"`
	// WrongID makes the answer have another id than the request.
	WrongID bool `json:"wrong_id"`
	End     *End `json:"end"`
}

// End is how a call ends.
type End struct {
	// Code is a gRPC code such as UNAVAILABLE, with the contract's Reason if that is set; empty: OK.
	Code    codes.Code `json:"code"`
	Reason  string     `json:"reason"`
	Message string     `json:"message"`
	// Metadata are further values of the error.
	Metadata map[string]string `json:"metadata"`
	// RetryAfter is the delay in milliseconds that the error requests; 0: none.
	RetryAfter int `json:"retry_after_ms"`
	// AfterLines is the number of lines that the client must have reported before a stream ends: all of what a cut must not take.
	AfterLines int `json:"after_lines"`
	// Cut resets the server's connections.
	Cut bool `json:"cut"`
	// GoAway makes the server end its connections as a server that shuts down does, before the error.
	GoAway bool `json:"goaway"`
}

// status returns the error of a call that ends; nil: OK.
func (e *End) status() error {
	s := status.New(e.Code, e.Message)
	var details []protoadapt.MessageV1
	if e.Reason != "" {
		details = append(details, &errdetails.ErrorInfo{Reason: e.Reason, Domain: "kvcast", Metadata: e.Metadata})
	}
	if e.RetryAfter > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(time.Duration(e.RetryAfter) * time.Millisecond)})
	}
	if len(details) == 0 {
		return s.Err()
	}
	s, err := s.WithDetails(details...)
	if err != nil {
		return fmt.Errorf("make a status: %w", err)
	}
	return s.Err()
}

// Load reads all scripts of a folder, by name. It checks that they can be played.
func Load(folder string) ([]*Script, error) {
	files, err := filepath.Glob(filepath.Join(folder, "*.json"))
	if err != nil {
		return nil, err
	}
	slices.Sort(files)
	all := make([]*Script, 0, len(files))
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		s, err := parse(text)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", filepath.Base(file), err)
		}
		s.Name = strings.TrimSuffix(filepath.Base(file), ".json")
		all = append(all, s)
	}
	return all, nil
}

func parse(text []byte) (*Script, error) {
	s := &Script{}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(s); err != nil {
		return nil, err
	}
	s.Servers = max(s.Servers, 1)
	switch {
	case s.About == "":
		return nil, fmt.Errorf("about is missing")
	case len(s.Calls) == 0:
		return nil, fmt.Errorf("calls are missing")
	case len(s.Want) == 0:
		return nil, fmt.Errorf("want is missing")
	}
	for i, stream := range s.Streams {
		if err := parses(stream.Expect, new(kvcastv1.SubscribeRequest)); err != nil {
			return nil, fmt.Errorf("streams[%d].expect: %w", i, err)
		}
		for j, m := range stream.Send {
			if err := parses(m, new(kvcastv1.SubscribeResponse)); err != nil {
				return nil, fmt.Errorf("streams[%d].send[%d]: %w", i, j, err)
			}
		}
	}
	for i, a := range s.Answers {
		m, ok := methods[a.Method]
		if !ok {
			return nil, fmt.Errorf("answers[%d]: method %q is not allowed", i, a.Method)
		}
		if err := parses(a.Expect, m.request()); err != nil {
			return nil, fmt.Errorf("answers[%d].expect: %w", i, err)
		}
		if err := parses(a.Response, m.response()); a.End == nil && err != nil {
			return nil, fmt.Errorf("answers[%d].response: %w", i, err)
		}
	}
	for i, stream := range s.MatchStreams {
		for j, a := range stream.Answers {
			if err := parses(a.Expect, new(kvcastv1.MatchPrefixesRequest)); err != nil {
				return nil, fmt.Errorf("match_streams[%d].answers[%d].expect: %w", i, j, err)
			}
			if err := parses(a.Response, new(kvcastv1.MatchPrefixResponse)); a.Response != nil && err != nil {
				return nil, fmt.Errorf("match_streams[%d].answers[%d].response: %w", i, j, err)
			}
		}
	}
	return s, nil
}

// parses parses a message in protobuf's JSON form; text may be missing, which is an empty message.
func parses(text json.RawMessage, into proto.Message) error {
	if text == nil {
		return nil
	}
	return protojson.Unmarshal(text, into)
}

// method is a unary call.
type method struct{ request, response func() proto.Message }

// methods are the unary calls that scripts can answer.
var methods = map[string]method{
	"MatchPrefix":   {func() proto.Message { return new(kvcastv1.MatchPrefixRequest) }, func() proto.Message { return new(kvcastv1.MatchPrefixResponse) }},
	"LookupBlocks":  {func() proto.Message { return new(kvcastv1.LookupBlocksRequest) }, func() proto.Message { return new(kvcastv1.LookupBlocksResponse) }},
	"ListWorkers":   {func() proto.Message { return new(kvcastv1.ListWorkersRequest) }, func() proto.Message { return new(kvcastv1.ListWorkersResponse) }},
	"ReportOutcome": {func() proto.Message { return new(kvcastv1.ReportOutcomeRequest) }, func() proto.Message { return new(kvcastv1.ReportOutcomeResponse) }},
	"NoteRouted":    {func() proto.Message { return new(kvcastv1.NoteRoutedRequest) }, func() proto.Message { return new(kvcastv1.NoteRoutedResponse) }},
}
