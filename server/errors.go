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

	"github.com/kvcast/kvcast/internal/journal"
)

// errorDomain is the domain of every ErrorInfo.
const errorDomain = "kvcast"

// reason is a reason of the contract and the gRPC status of its errors.
type reason struct {
	name      string
	code      codes.Code
	retryable bool // the error has RetryInfo
}

var (
	reasonPositionCompacted  = reason{"POSITION_COMPACTED", codes.OutOfRange, false}
	reasonPositionAhead      = reason{"POSITION_AHEAD", codes.OutOfRange, false}
	reasonEpochMismatch      = reason{"EPOCH_MISMATCH", codes.FailedPrecondition, false}
	reasonBehind             = reason{"BEHIND", codes.Unavailable, true}
	reasonOutdated           = reason{"OUTDATED", codes.Unavailable, true}
	reasonPositionNotReached = reason{"POSITION_NOT_REACHED", codes.DeadlineExceeded, true}
	reasonStarting           = reason{"STARTING", codes.Unavailable, true}
	reasonShuttingDown       = reason{"SHUTTING_DOWN", codes.Unavailable, true}
	reasonMaxConnectionAge   = reason{"MAX_CONNECTION_AGE", codes.Unavailable, true}
	reasonTooManySubs        = reason{"TOO_MANY_SUBSCRIBERS", codes.ResourceExhausted, true}
	reasonTooManySnapshots   = reason{"TOO_MANY_SNAPSHOTS", codes.ResourceExhausted, true}
	reasonTooManyHolders     = reason{"TOO_MANY_HOLDERS", codes.ResourceExhausted, false}
	reasonTooManyQueries     = reason{"TOO_MANY_QUERIES", codes.ResourceExhausted, true}
	reasonResponseTooLarge   = reason{"RESPONSE_TOO_LARGE", codes.ResourceExhausted, false}
	reasonFiltersTooLarge    = reason{"FILTERS_TOO_LARGE", codes.ResourceExhausted, true}
	reasonTooManyStreams     = reason{"TOO_MANY_STREAMS", codes.ResourceExhausted, true}
	reasonTooManyWorkers     = reason{"TOO_MANY_WORKERS", codes.ResourceExhausted, false}
	reasonTooManySources     = reason{"TOO_MANY_SOURCES", codes.ResourceExhausted, false}
	reasonWorkersTooLarge    = reason{"WORKERS_TOO_LARGE", codes.ResourceExhausted, false}
	reasonSlowSubscriber     = reason{"SLOW_SUBSCRIBER", codes.ResourceExhausted, true}
	reasonNotStored          = reason{"NOT_STORED", codes.Unavailable, true}
	reasonNotIngesting       = reason{"NOT_INGESTING", codes.FailedPrecondition, false}
	reasonNotServing         = reason{"NOT_SERVING", codes.Unavailable, false}
	reasonWorkerExists       = reason{"WORKER_EXISTS", codes.AlreadyExists, false}
	reasonWorkerNotFound     = reason{"WORKER_NOT_FOUND", codes.NotFound, false}
	reasonInvalidArgument    = reason{"INVALID_ARGUMENT", codes.InvalidArgument, false}
	reasonUnauthenticated    = reason{"UNAUTHENTICATED", codes.Unauthenticated, false}
	reasonPermissionDenied   = reason{"PERMISSION_DENIED", codes.PermissionDenied, false}
	reasonUnimplemented      = reason{"UNIMPLEMENTED", codes.Unimplemented, false}
	reasonInternal           = reason{"INTERNAL", codes.Internal, true}
)

// retryDelay is the delay in RetryInfo.
const retryDelay = time.Second

// statusError is an error with the status that gRPC sends to the client.
type statusError struct {
	reason reason
	status *status.Status
}

func (e *statusError) Error() string { return e.status.String() }

// GRPCStatus is the method that gRPC calls to get an error's status.
func (e *statusError) GRPCStatus() *status.Status { return e.status }

func hasReason(err error, reasons ...reason) bool {
	var s *statusError
	return errors.As(err, &s) && slices.Contains(reasons, s.reason)
}

// errorf returns an error whose ErrorInfo has the journal's bounds. With zero Bounds, the ErrorInfo has no metadata:
// clients that have not sent a valid token must not see the bounds.
func errorf(r reason, b journal.Bounds, format string, args ...any) error {
	return newStatusError(r, b, fmt.Sprintf(format, args...))
}

func newStatusError(r reason, b journal.Bounds, message string, details ...protoadapt.MessageV1) error {
	info := &errdetails.ErrorInfo{Reason: r.name, Domain: errorDomain}
	if b != (journal.Bounds{}) {
		info.Metadata = map[string]string{
			"epoch":  b.Epoch,
			"oldest": strconv.FormatUint(b.Oldest, 10),
			"newest": strconv.FormatUint(b.Newest, 10),
		}
	}
	details = append([]protoadapt.MessageV1{info}, details...)
	if r.retryable {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(retryDelay)})
	}
	s := status.New(r.code, message)
	if detailed, err := s.WithDetails(details...); err == nil {
		s = detailed
	}
	return &statusError{reason: r, status: s}
}

type violation = errdetails.BadRequest_FieldViolation

// maxViolations bounds the violations in an error, since gRPC clients accept about 8 KiB of error details.
const maxViolations = 16

func invalidFields(violations []*violation, b journal.Bounds) error {
	violations = violations[:min(len(violations), maxViolations)]
	messages := make([]string, len(violations))
	for i, v := range violations {
		messages[i] = v.GetField() + ": " + v.GetDescription()
	}
	return newStatusError(reasonInvalidArgument, b, strings.Join(messages, "; "), &errdetails.BadRequest{FieldViolations: violations})
}

func invalidField(b journal.Bounds, field, format string, args ...any) error {
	return invalidFields([]*violation{{Field: field, Description: fmt.Sprintf(format, args...)}}, b)
}

func shuttingDown(b journal.Bounds) error {
	return errorf(reasonShuttingDown, b, "the server is shutting down, and everything up to the last position has been sent; "+
		"resume after it when a server is back, or start from a snapshot if the epoch has changed")
}

func maxConnectionAge(b journal.Bounds) error {
	return errorf(reasonMaxConnectionAge, b,
		"the connection has reached the age limit; resume after the last position over a new connection")
}

func tooManyHolders(b journal.Bounds, format string, args ...any) error {
	return errorf(reasonTooManyHolders, b, "the blocks %s, which is the limit; ask for fewer blocks, or narrow the filter", fmt.Sprintf(format, args...))
}

func responseTooLarge(b journal.Bounds, contents, hint string) error {
	return errorf(reasonResponseTooLarge, b, "%s take more than %d MiB, the default limit of gRPC clients; %s", contents, maxResponse>>20, hint)
}

func internalError(b journal.Bounds) error {
	return errorf(reasonInternal, b, "the call failed because of a bug in the server, which continues to run; see its log; try again")
}

// readError converts a *journal.PositionError to the client's error, and returns all other errors unchanged.
func readError(err error) error {
	var pe *journal.PositionError
	switch {
	case !errors.As(err, &pe):
		return err
	case errors.Is(err, journal.ErrCompacted):
		return errorf(reasonPositionCompacted, pe.Bounds,
			"position %d is no longer retained: the oldest entry is %d and the newest %d; start from a snapshot", pe.After, pe.Bounds.Oldest, pe.Bounds.Newest)
	}
	return errorf(reasonPositionAhead, pe.Bounds,
		"position %d is beyond the newest entry %d: it is from another server or mistyped; start from a snapshot", pe.After, pe.Bounds.Newest)
}
