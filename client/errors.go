package client

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Reasons of an Error. RouterEventService of the contract says what each means, and what to do.
const (
	ReasonPositionCompacted  = "POSITION_COMPACTED"
	ReasonPositionAhead      = "POSITION_AHEAD"
	ReasonBehind             = "BEHIND"
	ReasonOutdated           = "OUTDATED"
	ReasonEpochMismatch      = "EPOCH_MISMATCH"
	ReasonSlowSubscriber     = "SLOW_SUBSCRIBER"
	ReasonTooManySubscribers = "TOO_MANY_SUBSCRIBERS"
	ReasonTooManySnapshots   = "TOO_MANY_SNAPSHOTS"
	ReasonTooManyHolders     = "TOO_MANY_HOLDERS"
	ReasonPositionNotReached = "POSITION_NOT_REACHED"
	ReasonTooManyQueries     = "TOO_MANY_QUERIES"
	ReasonResponseTooLarge   = "RESPONSE_TOO_LARGE"
	ReasonTooManyStreams     = "TOO_MANY_STREAMS"
	ReasonFiltersTooLarge    = "FILTERS_TOO_LARGE"
	ReasonStarting           = "STARTING"
	ReasonNotServing         = "NOT_SERVING"
	ReasonShuttingDown       = "SHUTTING_DOWN"
	ReasonMaxConnectionAge   = "MAX_CONNECTION_AGE"
	ReasonInvalidArgument    = "INVALID_ARGUMENT"
	ReasonUnimplemented      = "UNIMPLEMENTED"
	ReasonInternal           = "INTERNAL"
	ReasonUnauthenticated    = "UNAUTHENTICATED"
	ReasonPermissionDenied   = "PERMISSION_DENIED"
)

// errorDomain is the domain of the server's ErrorInfo.
const errorDomain = "kvcast"

var (
	// ErrIdle is the Interruption of a stream that received no message within the idle timeout.
	ErrIdle = errors.New("no message was received within the idle timeout")
	// ErrEnded is the Interruption of a stream that the server ended without an error.
	ErrEnded = errors.New("the server ended the stream")
	// ErrConnClosed ends a subscription whose connection was closed by its owner.
	ErrConnClosed = errors.New("the connection was closed by its owner")
)

// Error is the status with which a stream ended.
type Error struct {
	// Code is the gRPC code.
	Code codes.Code
	// Reason is the contract's reason; empty if the error does not come from a kvcast server.
	Reason string
	// Message describes the problem and what to do.
	Message string
	// Epoch, Oldest and Newest are the epoch and the range of retained seqs of the server's journal. They are
	// empty and 0 if the error has no such metadata, as UNAUTHENTICATED.
	Epoch          string
	Oldest, Newest uint64
	// RetryAfter is the delay that the server requests before a retry; 0: none.
	RetryAfter time.Duration

	status *status.Status
}

func (e *Error) Error() string {
	if e.Reason != "" {
		return fmt.Sprintf("%s: %s: %s", e.Code, e.Reason, e.Message)
	}
	return fmt.Sprintf("%s: %s", e.Code, e.Message)
}

// GRPCStatus returns the status, for status.FromError.
func (e *Error) GRPCStatus() *status.Status { return e.status }

func newError(err error) *Error {
	s := status.Convert(err)
	e := &Error{Code: s.Code(), Message: s.Message(), status: s}
	for _, d := range s.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			if d.GetDomain() != errorDomain {
				continue
			}
			e.Reason, e.Epoch = d.GetReason(), d.GetMetadata()["epoch"]
			// A value that is not a number becomes 0.
			e.Oldest, _ = strconv.ParseUint(d.GetMetadata()["oldest"], 10, 64)
			e.Newest, _ = strconv.ParseUint(d.GetMetadata()["newest"], 10, 64)
		case *errdetails.RetryInfo:
			e.RetryAfter = d.GetRetryDelay().AsDuration()
		}
	}
	return e
}

// permanent reports whether a retry would fail with the same code.
func (e *Error) permanent() bool {
	return slices.Contains([]codes.Code{
		codes.InvalidArgument, codes.Unauthenticated, codes.PermissionDenied, codes.Unimplemented,
		codes.OutOfRange, codes.FailedPrecondition,
	}, e.Code)
}

// positionLost reports whether the entries after the position are not available, so that only a snapshot helps.
func (e *Error) positionLost() bool {
	return e.Reason == ReasonPositionCompacted || e.Reason == ReasonEpochMismatch
}

// ViolationError is a violation of the contract by the server, such as a missing or duplicate message. The
// violating message is not delivered.
type ViolationError struct {
	// At is the last valid position; zero: there is none.
	At Position
	// What describes the violation.
	What string
}

func (e *ViolationError) Error() string {
	if e.At.IsZero() {
		return "the stream violates the contract: " + e.What
	}
	return fmt.Sprintf("the stream violates the contract after %v: %s", e.At, e.What)
}
