// Package callerror makes the errors of calls, as the contract describes them: with a reason, the bounds of the journal, and whether and
// when to try again.
package callerror

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

// Reason is a reason of the contract and the gRPC status of its errors.
type Reason struct {
	name      string
	code      codes.Code
	retryable bool // the error has RetryInfo
}

// The reasons of the contract, which describes them.
var (
	PositionCompacted  = Reason{"POSITION_COMPACTED", codes.OutOfRange, false}
	PositionAhead      = Reason{"POSITION_AHEAD", codes.OutOfRange, false}
	EpochMismatch      = Reason{"EPOCH_MISMATCH", codes.FailedPrecondition, false}
	Behind             = Reason{"BEHIND", codes.Unavailable, true}
	Outdated           = Reason{"OUTDATED", codes.Unavailable, true}
	PositionNotReached = Reason{"POSITION_NOT_REACHED", codes.DeadlineExceeded, true}
	Starting           = Reason{"STARTING", codes.Unavailable, true}
	ShuttingDown       = Reason{"SHUTTING_DOWN", codes.Unavailable, true}
	MaxConnectionAge   = Reason{"MAX_CONNECTION_AGE", codes.Unavailable, true}
	TooManySubs        = Reason{"TOO_MANY_SUBSCRIBERS", codes.ResourceExhausted, true}
	TooManySnapshots   = Reason{"TOO_MANY_SNAPSHOTS", codes.ResourceExhausted, true}
	TooManyHolders     = Reason{"TOO_MANY_HOLDERS", codes.ResourceExhausted, false}
	TooManyQueries     = Reason{"TOO_MANY_QUERIES", codes.ResourceExhausted, true}
	ResponseTooLarge   = Reason{"RESPONSE_TOO_LARGE", codes.ResourceExhausted, false}
	FiltersTooLarge    = Reason{"FILTERS_TOO_LARGE", codes.ResourceExhausted, true}
	TooManyStreams     = Reason{"TOO_MANY_STREAMS", codes.ResourceExhausted, true}
	TooManyWorkers     = Reason{"TOO_MANY_WORKERS", codes.ResourceExhausted, false}
	TooManySources     = Reason{"TOO_MANY_SOURCES", codes.ResourceExhausted, false}
	WorkersTooLarge    = Reason{"WORKERS_TOO_LARGE", codes.ResourceExhausted, false}
	SlowSubscriber     = Reason{"SLOW_SUBSCRIBER", codes.ResourceExhausted, true}
	NotStored          = Reason{"NOT_STORED", codes.Unavailable, true}
	NotIngesting       = Reason{"NOT_INGESTING", codes.FailedPrecondition, false}
	NotServing         = Reason{"NOT_SERVING", codes.Unavailable, false}
	WorkerExists       = Reason{"WORKER_EXISTS", codes.AlreadyExists, false}
	WorkerNotFound     = Reason{"WORKER_NOT_FOUND", codes.NotFound, false}
	InvalidArgument    = Reason{"INVALID_ARGUMENT", codes.InvalidArgument, false}
	Unauthenticated    = Reason{"UNAUTHENTICATED", codes.Unauthenticated, false}
	PermissionDenied   = Reason{"PERMISSION_DENIED", codes.PermissionDenied, false}
	Unimplemented      = Reason{"UNIMPLEMENTED", codes.Unimplemented, false}
	Internal           = Reason{"INTERNAL", codes.Internal, true}
)

// retryDelay is the delay in RetryInfo.
const retryDelay = time.Second

// statusError is an error with the status that gRPC sends to the client.
type statusError struct {
	reason Reason
	status *status.Status
}

func (e *statusError) Error() string { return e.status.String() }

// GRPCStatus is the method that gRPC calls to get an error's status.
func (e *statusError) GRPCStatus() *status.Status { return e.status }

// Has reports whether an error has one of some reasons.
func Has(err error, reasons ...Reason) bool {
	var s *statusError
	return errors.As(err, &s) && slices.Contains(reasons, s.reason)
}

// ReasonOf returns the name of an error's reason; empty if it is not of this package.
func ReasonOf(err error) string {
	var s *statusError
	if !errors.As(err, &s) {
		return ""
	}
	return s.reason.name
}

// New returns an error whose ErrorInfo has the journal's bounds. With zero Bounds, the ErrorInfo has no metadata:
// clients that have not sent a valid token must not see the bounds.
func New(r Reason, b journal.Bounds, format string, args ...any) error {
	return newStatusError(r, b, fmt.Sprintf(format, args...))
}

func newStatusError(r Reason, b journal.Bounds, message string, details ...protoadapt.MessageV1) error {
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

// Violation is a field of a request that is not allowed.
type Violation = errdetails.BadRequest_FieldViolation

// maxViolations bounds the violations in an error, since gRPC clients accept about 8 KiB of error details.
const maxViolations = 16

// InvalidFields returns the error of a request with fields that are not allowed, which names up to 16 of them.
func InvalidFields(violations []*Violation, b journal.Bounds) error {
	violations = violations[:min(len(violations), maxViolations)]
	messages := make([]string, len(violations))
	for i, v := range violations {
		messages[i] = v.GetField() + ": " + v.GetDescription()
	}
	return newStatusError(InvalidArgument, b, strings.Join(messages, "; "), &errdetails.BadRequest{FieldViolations: violations})
}

// InvalidField returns the error of a request with a field that is not allowed.
func InvalidField(b journal.Bounds, field, format string, args ...any) error {
	return InvalidFields([]*Violation{{Field: field, Description: fmt.Sprintf(format, args...)}}, b)
}

// Draining returns the error that ends a stream, or refuses a call, since the server is shutting down.
func Draining(b journal.Bounds) error {
	return New(ShuttingDown, b, "the server is shutting down, and everything up to the last position has been sent; "+
		"resume after it when a server is back, or start from a snapshot if the epoch has changed")
}

// AgeReached returns the error that ends a Subscribe stream, since its connection has reached the age limit.
func AgeReached(b journal.Bounds) error {
	return New(MaxConnectionAge, b,
		"the connection has reached the age limit; resume after the last position over a new connection")
}

// ManyHolders returns the error of a lookup with more holders than a response may have.
func ManyHolders(b journal.Bounds, format string, args ...any) error {
	return New(TooManyHolders, b, "the blocks %s, which is the limit; ask for fewer blocks, or narrow the filter", fmt.Sprintf(format, args...))
}

// MaxResponse is the default receive limit of gRPC clients, in bytes.
const MaxResponse = 4 << 20

// LargeResponse returns the error of a call whose response would be larger than MaxResponse.
func LargeResponse(b journal.Bounds, contents, hint string) error {
	return New(ResponseTooLarge, b, "%s take more than %d MiB, the default limit of gRPC clients; %s", contents, MaxResponse>>20, hint)
}

// Bug returns the error of a call that has panicked.
func Bug(b journal.Bounds) error {
	return New(Internal, b, "the call failed because of a bug in the server, which continues to run; see its log; try again")
}

// OfRead converts a *journal.PositionError to the client's error, and returns all other errors unchanged.
func OfRead(err error) error {
	var pe *journal.PositionError
	switch {
	case !errors.As(err, &pe):
		return err
	case errors.Is(err, journal.ErrCompacted):
		return New(PositionCompacted, pe.Bounds,
			"position %d is no longer retained: the oldest entry is %d and the newest %d; start from a snapshot", pe.After, pe.Bounds.Oldest, pe.Bounds.Newest)
	}
	return New(PositionAhead, pe.Bounds,
		"position %d is beyond the newest entry %d: it is from another server or mistyped; start from a snapshot", pe.After, pe.Bounds.Newest)
}
