package console

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/budget"
)

// encoding is the form of answers: that of the commands with -o json.
var encoding = protojson.MarshalOptions{UseProtoNames: true}

// problem is an error as JSON.
type problem struct {
	// Code is the name of the gRPC code in lower case, or why the console refuses the request.
	Code string `json:"code"`
	// Reason is that of the ErrorInfo; empty if there is none.
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message"`
}

// httpStatus has the status of each gRPC code that is not 500.
var httpStatus = map[codes.Code]int{
	codes.InvalidArgument:    http.StatusBadRequest,
	codes.OutOfRange:         http.StatusBadRequest,
	codes.FailedPrecondition: http.StatusBadRequest,
	codes.Unauthenticated:    http.StatusUnauthorized,
	codes.PermissionDenied:   http.StatusForbidden,
	codes.NotFound:           http.StatusNotFound,
	codes.Unimplemented:      http.StatusNotFound,
	codes.ResourceExhausted:  http.StatusTooManyRequests,
	codes.Unavailable:        http.StatusServiceUnavailable,
	codes.DeadlineExceeded:   http.StatusGatewayTimeout,
}

// rpc answers a unary call: the request and the answer are the messages of the contract as JSON.
func (c *Console) rpc(w http.ResponseWriter, r *http.Request) {
	if !isJSON(r) {
		refuseContentType(w)
		return
	}
	text, err := c.call(w, r)
	address := budget.ClientOf(r.RemoteAddr)
	if err == nil && c.answers.Reserve(address, int64(len(text))) != nil {
		err = status.Errorf(codes.ResourceExhausted, "the answers that are being sent have more than %d bytes, which is the limit; try again later", maxAnswerBytes)
	}
	if err != nil {
		writeStatus(w, err)
		return
	}
	defer c.answers.Release(address, int64(len(text)))
	writeJSON(w, http.StatusOK, text)
}

// call calls the method that a request names, and returns the encoded answer.
func (c *Console) call(w http.ResponseWriter, r *http.Request) (text []byte, err error) {
	release := func() {}
	defer func() { release() }()
	answer, err := c.cfg.Server.Call(r.Context(), "/"+r.PathValue("service")+"/"+r.PathValue("method"), c.caller(r), func(m proto.Message) error {
		address := budget.ClientOf(r.RemoteAddr)
		switch err := c.calls.Reserve(address, 1); {
		case errors.Is(err, budget.ErrShare):
			return status.Errorf(codes.ResourceExhausted, "%d calls from this address are in progress, which is the limit; try again later", maxCallsPerAddress)
		case err != nil:
			return status.Errorf(codes.ResourceExhausted, "%d calls are in progress, which is the limit; try again later", maxCalls)
		}
		release = func() { c.calls.Release(address, 1) }
		if err := http.NewResponseController(w).SetReadDeadline(time.Now().Add(readTimeout)); err != nil {
			return err
		}
		return decode(http.MaxBytesReader(w, r.Body, maxRequestBytes), m)
	})
	if err != nil {
		return nil, err
	}
	return encoding.Marshal(answer)
}

func decode(body io.Reader, m proto.Message) error {
	text, err := io.ReadAll(body)
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return status.Errorf(codes.InvalidArgument, "the request has more than %d bytes, which is the limit", tooLarge.Limit)
	case err != nil:
		return status.Errorf(codes.InvalidArgument, "read the request: %v", err)
	}
	if n := bytes.Count(text, []byte("{")); n > maxObjects {
		return status.Errorf(codes.InvalidArgument, "the request has %d objects: want at most %d", n, maxObjects)
	}
	if err := protojson.Unmarshal(text, m); err != nil { // it has a part of the request, of any length
		return status.Errorf(codes.InvalidArgument, "the request is no %s in JSON: %.300v", m.ProtoReflect().Descriptor().FullName(), err)
	}
	return nil
}

func refuseContentType(w http.ResponseWriter) {
	writeError(w, http.StatusUnsupportedMediaType, problem{Code: "unsupported_media_type", Message: "want a body with Content-Type: application/json"})
}

// problemOf returns an error of the server for people and for the page.
func problemOf(err error) problem {
	s := status.Convert(err)
	p := problem{Code: codeName(s.Code()), Message: s.Message()}
	for _, d := range s.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			p.Reason = info.GetReason()
		}
	}
	return p
}

// codeName returns the name of a code in the form of its constant, such as resource_exhausted for ResourceExhausted.
func codeName(c codes.Code) string {
	var b strings.Builder
	for i, r := range c.String() {
		if i > 0 && r >= 'A' && r <= 'Z' {
			_ = b.WriteByte('_')
		}
		_, _ = b.WriteRune(r)
	}
	return strings.ToLower(b.String())
}

func writeStatus(w http.ResponseWriter, err error) {
	code, ok := httpStatus[status.Code(err)]
	if !ok {
		code = http.StatusInternalServerError
	}
	if code == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", "Bearer")
		w.Header().Set("Connection", "close") // the client's certificate may have expired since the connection began
	}
	writeError(w, code, problemOf(err))
}

func writeError(w http.ResponseWriter, code int, p problem) {
	text, err := json.Marshal(p)
	if err != nil {
		code, text = http.StatusInternalServerError, []byte("{}")
	}
	writeJSON(w, code, text)
}

func writeJSON(w http.ResponseWriter, code int, text []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(answerTimeout)) // an answer that is not read ends
	w.WriteHeader(code)
	_, _ = w.Write(text) // the client may be gone
}
