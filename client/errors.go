package client

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Reasons that a server gives for an Error; the contract lists them all.
const (
	ReasonPositionCompacted = "POSITION_COMPACTED"
	ReasonPositionAhead     = "POSITION_AHEAD"
	ReasonEpochMismatch     = "EPOCH_MISMATCH"
)

// errorDomain is the domain of the server's reasons.
const errorDomain = "kvcast"

var (
	// ErrIdle is why a stream was given up over which nothing came for the
	// IdleTimeout.
	ErrIdle = errors.New("nothing came for the idle timeout")
	// ErrEnded is why a stream is replaced that the server ended without an error.
	ErrEnded = errors.New("the server ended the stream")
	// ErrConnClosed ends a subscription over a connection that its owner has closed.
	ErrConnClosed = errors.New("the connection was closed by its owner")
)

// Error is a status that a server ended a stream with.
type Error struct {
	// Code is the gRPC code.
	Code codes.Code
	// Reason is one of the contract's; empty where something else than a kvcast
	// server answered, or none did.
	Reason string
	// Message says what is wrong and what to do.
	Message string
	// Epoch, Oldest and Newest are the server's journal; empty and 0 where Reason is
	// empty, and where the server told nothing of it, as in UNAUTHENTICATED.
	Epoch          string
	Oldest, Newest uint64
	// RetryAfter is how long the server asks to wait; 0 where it does not.
	RetryAfter time.Duration

	status *status.Status
}

func (e *Error) Error() string {
	if e.Reason != "" {
		return fmt.Sprintf("%s: %s: %s", e.Code, e.Reason, e.Message)
	}
	return fmt.Sprintf("%s: %s", e.Code, e.Message)
}

// GRPCStatus is what status.FromError finds.
func (e *Error) GRPCStatus() *status.Status { return e.status }

// newError makes an Error of what a gRPC call failed with.
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
			// What is not a number is not known, which is 0.
			e.Oldest, _ = strconv.ParseUint(d.GetMetadata()["oldest"], 10, 64)
			e.Newest, _ = strconv.ParseUint(d.GetMetadata()["newest"], 10, 64)
		case *errdetails.RetryInfo:
			e.RetryAfter = d.GetRetryDelay().AsDuration()
		}
	}
	return e
}

// permanent tells that asking again would get the same answer.
func (e *Error) permanent() bool {
	switch e.Code {
	case codes.InvalidArgument, codes.Unauthenticated, codes.PermissionDenied, codes.Unimplemented,
		codes.OutOfRange, codes.FailedPrecondition:
		return true
	default:
		return false
	}
}

// gone tells that a snapshot can take the place of what was asked for.
func (e *Error) gone() bool {
	return e.Reason == ReasonPositionCompacted || e.Reason == ReasonEpochMismatch
}

// ViolationError is a stream that was not what the contract says: a message is
// missing, came twice, or is of another place. What it found wrong was not
// delivered.
type ViolationError struct {
	// At is the last position that is known to be right.
	At Position
	// What is wrong.
	What string
}

func (e *ViolationError) Error() string {
	return fmt.Sprintf("the stream is not to be trusted after %v: %s", e.At, e.What)
}
