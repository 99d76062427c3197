package server

import (
	"fmt"
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

// Domain is that of every ErrorInfo.
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

// retryDelay is what RetryInfo asks for where the client should come back.
const retryDelay = time.Second

// statusError makes an error for a client: every one says what to do, and
// carries the reason and what is retained.
func statusError(code codes.Code, reason string, b journal.Bounds, message string, details ...protoadapt.MessageV1) error {
	return errorWith(code, reason, map[string]string{
		"epoch":  b.Epoch,
		"oldest": strconv.FormatUint(b.Oldest, 10),
		"newest": strconv.FormatUint(b.Newest, 10),
	}, message, details...)
}

// openError makes an error for a client that may have no token. It carries nothing
// of the stream.
func openError(code codes.Code, reason, message string, details ...protoadapt.MessageV1) error {
	return errorWith(code, reason, nil, message, details...)
}

func errorWith(code codes.Code, reason string, metadata map[string]string, message string, details ...protoadapt.MessageV1) error {
	info := &errdetails.ErrorInfo{Reason: reason, Domain: Domain, Metadata: metadata}
	s := status.New(code, message)
	if with, err := s.WithDetails(append([]protoadapt.MessageV1{info}, details...)...); err == nil {
		s = with
	}
	return s.Err()
}

func retryInfo() *errdetails.RetryInfo {
	return &errdetails.RetryInfo{RetryDelay: durationpb.New(retryDelay)}
}

func errCompacted(after uint64, b journal.Bounds) error {
	return statusError(codes.OutOfRange, ReasonPositionCompacted, b, fmt.Sprintf(
		"position %d is no longer retained: the oldest entry is %d and the newest %d; start from a snapshot",
		after, b.Oldest, b.Newest))
}

func errAhead(after uint64, b journal.Bounds) error {
	return statusError(codes.OutOfRange, ReasonPositionAhead, b, fmt.Sprintf(
		"position %d is beyond the newest entry %d: it is of another server, or mistyped; start from a snapshot",
		after, b.Newest))
}

func errEpochMismatch(epoch string, b journal.Bounds) error {
	return statusError(codes.FailedPrecondition, ReasonEpochMismatch, b, fmt.Sprintf(
		"position is of epoch %.64q, the journal's is %q: the entries of that epoch are lost; start from a snapshot",
		epoch, b.Epoch))
}

func errStarting(b journal.Bounds) error {
	return statusError(codes.Unavailable, ReasonStarting, b,
		"the server is starting, and does not know yet what the engines hold; try again", retryInfo())
}

func errShuttingDown(b journal.Bounds) error {
	return statusError(codes.Unavailable, ReasonShuttingDown, b,
		"the server is shutting down, and everything up to the last position has been sent; resume after it when a server is back, and start anew if its epoch is another", retryInfo())
}

func errMaxConnectionAge(b journal.Bounds) error {
	return statusError(codes.Unavailable, ReasonMaxConnectionAge, b,
		"the connection has reached the age at which the server has clients choose a server anew; resume after the last position, which may be at another one", retryInfo())
}

func errTooManySubscribers(limit int, b journal.Bounds) error {
	return statusError(codes.ResourceExhausted, ReasonTooManySubs, b, fmt.Sprintf(
		"%d subscribers are connected, which is the limit; try again later", limit), retryInfo())
}

func errTooManyReplays(limit int, b journal.Bounds) error {
	return statusError(codes.ResourceExhausted, ReasonTooManySubs, b, fmt.Sprintf(
		"%d replays are being sent, which is the limit; try again later", limit), retryInfo())
}

func errSlowSubscriber(limit time.Duration, b journal.Bounds) error {
	return statusError(codes.ResourceExhausted, ReasonSlowSubscriber, b, fmt.Sprintf(
		"nothing was read for %v, which is the limit; resume after the last position, and read faster", limit), retryInfo())
}

func errHeldTooMuch(b journal.Bounds) error {
	return statusError(codes.ResourceExhausted, ReasonSlowSubscriber, b, fmt.Sprintf(
		"what was being sent is no longer retained, nothing of it was read for %v, and too much of such memory is held; read faster, and come back for a snapshot", pressureTime), retryInfo())
}

func errTooManySnapshots(limit int, why string, b journal.Bounds) error {
	return statusError(codes.ResourceExhausted, ReasonTooManySnapshots, b, fmt.Sprintf(
		"%d snapshots are being sent, which is the limit, and %s; try again later, or resume after a position", limit, why), retryInfo())
}

func errTooManyHolders(how string, b journal.Bounds) error {
	return statusError(codes.ResourceExhausted, ReasonTooManyHolders, b, fmt.Sprintf(
		"the blocks %s, which is the limit; ask for fewer blocks, or narrow the filter", how))
}

func errTooManyQueries(limit int, why string, b journal.Bounds) error {
	return statusError(codes.ResourceExhausted, ReasonTooManyQueries, b, fmt.Sprintf(
		"%d queries of this kind are running, which is the limit, and %s; try again later", limit, why), retryInfo())
}

func errResponseTooLarge(what, do string, b journal.Bounds) error {
	return statusError(codes.ResourceExhausted, ReasonResponseTooLarge, b, fmt.Sprintf(
		"%s take more than %d MiB, which is what clients of gRPC take; %s", what, maxResponse>>20, do))
}

func errFiltersTooLarge(bytes, limit int64, b journal.Bounds) error {
	return statusError(codes.ResourceExhausted, ReasonFiltersTooLarge, b, fmt.Sprintf(
		"the filter takes %d bytes, and with those of the calls in progress more than %d, which is the limit; name fewer workers and models, try again later, or raise the limit (--subscribers-filter-bytes)", bytes, limit), retryInfo())
}

func errSlowSnapshot(b journal.Bounds) error {
	return statusError(codes.ResourceExhausted, ReasonSlowSubscriber, b,
		"the snapshot was read so slowly that entries since its beginning are no longer retained; read faster, or let the server retain more (--journal-max-bytes)", retryInfo())
}

func errSnapshotPace(limit time.Duration, b journal.Bounds) error {
	return statusError(codes.ResourceExhausted, ReasonSlowSubscriber, b, fmt.Sprintf(
		"the snapshot was read at less than %d MiB in %v, while others may be waiting for their turn; read faster", paceBytes>>20, limit), retryInfo())
}

func errInvalid(field, description string, b journal.Bounds) error {
	return errViolations([]*violation{{Field: field, Description: description}}, b)
}

// maxViolations is how many an error tells of: clients take errors of some 8 KiB.
const maxViolations = 16

// errViolations is for one violation at least.
func errViolations(violations []*violation, b journal.Bounds) error {
	violations = violations[:min(len(violations), maxViolations)]
	says := make([]string, len(violations))
	for i, v := range violations {
		says[i] = v.GetField() + ": " + v.GetDescription()
	}
	return statusError(codes.InvalidArgument, ReasonInvalidArgument, b, strings.Join(says, "; "),
		&errdetails.BadRequest{FieldViolations: violations})
}

func errWorkerExists(name string, b journal.Bounds) error {
	return statusError(codes.AlreadyExists, ReasonWorkerExists, b, fmt.Sprintf(
		"there is a worker %q, or its name is kept for a port's; choose another name, or deregister that one first", name))
}

func errNoWorker(name string, inStream bool, b journal.Bounds) error {
	message := fmt.Sprintf("there is no worker %.253q; ListWorkers tells which there are", name)
	if inStream {
		message = fmt.Sprintf(
			"worker %q is none that the server connects to: its engine connects to a port of the server by itself; stop the engine, and the worker is removed after the grace time", name)
	}
	return statusError(codes.NotFound, ReasonWorkerNotFound, b, message)
}

func errTooManySources(b journal.Bounds) error {
	return statusError(codes.ResourceExhausted, ReasonTooManySources, b,
		"the worker's sources, each counted once for each dp rank, are more than are left; deregister another worker, or let the server have more (--ingest-max-sources)")
}

func errWorkersTooLarge(b journal.Bounds) error {
	return statusError(codes.ResourceExhausted, ReasonWorkersTooLarge, b,
		"the labels and names of all registered workers take as much memory as they may; use fewer labels, deregister another worker, or let the server have more (--ingest-worker-bytes)")
}

func errTooManyWorkers(b journal.Bounds) error {
	return statusError(codes.ResourceExhausted, ReasonTooManyWorkers, b,
		"there are as many workers as there may be; deregister another, or let the server have more (--ingest-max-workers)")
}

func errNoLongerReading(b journal.Bounds) error {
	return statusError(codes.Unavailable, ReasonShuttingDown, b,
		"the server is shutting down, and reads no worker any more; try again when a server is back", retryInfo())
}

func errUnauthenticated(message string) error {
	return openError(codes.Unauthenticated, ReasonUnauthenticated, message)
}

func errTooManyStreams(message string) error {
	return openError(codes.ResourceExhausted, ReasonTooManyStreams, message, retryInfo())
}

func errServiceName(length int) error {
	v := &violation{Field: "service", Description: fmt.Sprintf("a name of %d bytes is not allowed: want at most %d", length, maxServiceName)}
	return openError(codes.InvalidArgument, ReasonInvalidArgument, v.GetField()+": "+v.GetDescription(),
		&errdetails.BadRequest{FieldViolations: []*violation{v}})
}

func errPermissionDenied(role Role, service string, b journal.Bounds) error {
	return statusError(codes.PermissionDenied, ReasonPermissionDenied, b, fmt.Sprintf(
		"the token's role is %s, which may not call %s; ask the server's operator for a token with the role %s", role, service, RoleOperator))
}

func errUnimplemented(b journal.Bounds, message string) error {
	return statusError(codes.Unimplemented, ReasonUnimplemented, b, message)
}

func errInternal(b journal.Bounds) error {
	return statusError(codes.Internal, ReasonInternal, b,
		"the server failed at this call, and goes on with others; its log says how; try again", retryInfo())
}
