package server

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvcast/kvcast/journal"
)

// Domain is the domain of every ErrorInfo.
const Domain = "kvcast"

// Reasons of ErrorInfo, as the contract lists them.
const (
	ReasonPositionCompacted = "POSITION_COMPACTED"
	ReasonPositionAhead     = "POSITION_AHEAD"
	ReasonEpochMismatch     = "EPOCH_MISMATCH"
	ReasonStarting          = "STARTING"
	ReasonShuttingDown      = "SHUTTING_DOWN"
	ReasonMaxConnectionAge  = "MAX_CONNECTION_AGE"
	ReasonTooManySubs       = "TOO_MANY_SUBSCRIBERS"
	ReasonTooManySnapshots  = "TOO_MANY_SNAPSHOTS"
	ReasonTooManyHolders    = "TOO_MANY_HOLDERS"
	ReasonTooManyQueries    = "TOO_MANY_QUERIES"
	ReasonResponseTooLarge  = "RESPONSE_TOO_LARGE"
	ReasonFiltersTooLarge   = "FILTERS_TOO_LARGE"
	ReasonTooManyStreams    = "TOO_MANY_STREAMS"
	ReasonTooManyWorkers    = "TOO_MANY_WORKERS"
	ReasonTooManySources    = "TOO_MANY_SOURCES"
	ReasonWorkersTooLarge   = "WORKERS_TOO_LARGE"
	ReasonSlowSubscriber    = "SLOW_SUBSCRIBER"
	ReasonWorkerExists      = "WORKER_EXISTS"
	ReasonWorkerNotFound    = "WORKER_NOT_FOUND"
	ReasonInvalidArgument   = "INVALID_ARGUMENT"
	ReasonUnauthenticated   = "UNAUTHENTICATED"
	ReasonPermissionDenied  = "PERMISSION_DENIED"
	ReasonUnimplemented     = "UNIMPLEMENTED"
	ReasonInternal          = "INTERNAL"
)

// reasonStatus is how an error with a reason is sent.
type reasonStatus struct {
	code  codes.Code
	retry bool // with RetryInfo
}

var reasons = map[string]reasonStatus{
	ReasonPositionCompacted: {code: codes.OutOfRange},
	ReasonPositionAhead:     {code: codes.OutOfRange},
	ReasonEpochMismatch:     {code: codes.FailedPrecondition},
	ReasonStarting:          {codes.Unavailable, true},
	ReasonShuttingDown:      {codes.Unavailable, true},
	ReasonMaxConnectionAge:  {codes.Unavailable, true},
	ReasonTooManySubs:       {codes.ResourceExhausted, true},
	ReasonTooManySnapshots:  {codes.ResourceExhausted, true},
	ReasonTooManyHolders:    {code: codes.ResourceExhausted},
	ReasonTooManyQueries:    {codes.ResourceExhausted, true},
	ReasonResponseTooLarge:  {code: codes.ResourceExhausted},
	ReasonFiltersTooLarge:   {codes.ResourceExhausted, true},
	ReasonTooManyStreams:    {codes.ResourceExhausted, true},
	ReasonTooManyWorkers:    {code: codes.ResourceExhausted},
	ReasonTooManySources:    {code: codes.ResourceExhausted},
	ReasonWorkersTooLarge:   {code: codes.ResourceExhausted},
	ReasonSlowSubscriber:    {codes.ResourceExhausted, true},
	ReasonWorkerExists:      {code: codes.AlreadyExists},
	ReasonWorkerNotFound:    {code: codes.NotFound},
	ReasonInvalidArgument:   {code: codes.InvalidArgument},
	ReasonUnauthenticated:   {code: codes.Unauthenticated},
	ReasonPermissionDenied:  {code: codes.PermissionDenied},
	ReasonUnimplemented:     {code: codes.Unimplemented},
	ReasonInternal:          {codes.Internal, true},
}

// retryDelay is the delay in RetryInfo.
const retryDelay = time.Second

// statusError is an error sent to a client, with its gRPC status and ErrorInfo.
type statusError struct {
	reason string
	status *status.Status
}

// Error implements error.
func (e *statusError) Error() string { return e.status.String() }

// GRPCStatus returns the status that gRPC sends.
func (e *statusError) GRPCStatus() *status.Status { return e.status }

// hasReason reports whether an error has one of the reasons.
func hasReason(err error, reasons ...string) bool {
	var s *statusError
	return errors.As(err, &s) && slices.Contains(reasons, s.reason)
}

// errorf returns an error whose ErrorInfo carries the journal's bounds. The zero
// Bounds leave them out, for clients that may be unauthenticated.
func errorf(reason string, b journal.Bounds, format string, args ...any) error {
	return newStatusError(reason, b, fmt.Sprintf(format, args...))
}

func newStatusError(reason string, b journal.Bounds, message string, details ...protoadapt.MessageV1) error {
	info := &errdetails.ErrorInfo{Reason: reason, Domain: Domain}
	if b != (journal.Bounds{}) {
		info.Metadata = map[string]string{
			"epoch":  b.Epoch,
			"oldest": strconv.FormatUint(b.Oldest, 10),
			"newest": strconv.FormatUint(b.Newest, 10),
		}
	}
	as := reasons[reason]
	details = append([]protoadapt.MessageV1{info}, details...)
	if as.retry {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(retryDelay)})
	}
	s := status.New(as.code, message)
	if detailed, err := s.WithDetails(details...); err == nil {
		s = detailed
	}
	return &statusError{reason: reason, status: s}
}

// violation is a request field with a value that is not allowed.
type violation = errdetails.BadRequest_FieldViolation

// maxViolations bounds the violations in an error: gRPC clients accept about 8 KiB.
const maxViolations = 16

// invalidFields returns an error for one or more violations.
func invalidFields(violations []*violation, b journal.Bounds) error {
	violations = violations[:min(len(violations), maxViolations)]
	messages := make([]string, len(violations))
	for i, v := range violations {
		messages[i] = v.GetField() + ": " + v.GetDescription()
	}
	return newStatusError(ReasonInvalidArgument, b, strings.Join(messages, "; "), &errdetails.BadRequest{FieldViolations: violations})
}

// invalidField returns an error for a request field.
func invalidField(b journal.Bounds, field, format string, args ...any) error {
	return invalidFields([]*violation{{Field: field, Description: fmt.Sprintf(format, args...)}}, b)
}

func positionCompacted(seq uint64, b journal.Bounds) error {
	return errorf(ReasonPositionCompacted, b,
		"position %d is no longer retained: the oldest entry is %d and the newest %d; start from a snapshot", seq, b.Oldest, b.Newest)
}

func positionAhead(seq uint64, b journal.Bounds) error {
	return errorf(ReasonPositionAhead, b,
		"position %d is beyond the newest entry %d: it is from another server or mistyped; start from a snapshot", seq, b.Newest)
}

func epochMismatch(epoch string, b journal.Bounds) error {
	return errorf(ReasonEpochMismatch, b,
		"the position has epoch %.64q, the journal %q: the entries of the former are lost; start from a snapshot", epoch, b.Epoch)
}

func shuttingDown(b journal.Bounds) error {
	return errorf(ReasonShuttingDown, b, "the server is shutting down, and everything up to the last position has been sent; "+
		"resume after it when a server is back, or start from a snapshot if the epoch has changed")
}

func maxConnectionAge(b journal.Bounds) error {
	return errorf(ReasonMaxConnectionAge, b,
		"the connection has reached the age limit; resume after the last position over a new connection")
}

func tooManyHolders(b journal.Bounds, format string, args ...any) error {
	return errorf(ReasonTooManyHolders, b, "the blocks %s, which is the limit; ask for fewer blocks, or narrow the filter", fmt.Sprintf(format, args...))
}

func responseTooLarge(b journal.Bounds, contents, hint string) error {
	return errorf(ReasonResponseTooLarge, b, "%s take more than %d MiB, the default limit of gRPC clients; %s", contents, maxResponse>>20, hint)
}

func internalError(b journal.Bounds) error {
	return errorf(ReasonInternal, b, "the call failed because of a bug in the server, which continues to run; see its log; try again")
}

// readError returns the client's error for a failed journal read.
func readError(err error) error {
	var pe *journal.PositionError
	switch {
	case !errors.As(err, &pe):
		return err
	case errors.Is(err, journal.ErrCompacted):
		return positionCompacted(pe.After, pe.Bounds)
	}
	return positionAhead(pe.After, pe.Bounds)
}
