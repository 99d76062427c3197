package client

import (
	"errors"
	"slices"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Error codes of JetStream, from nats-server's errors.json.
const (
	codeAccountResources  = 10002
	CodeNoPeers           = 10005
	codeUnavailable       = 10008
	codeInsufficient      = 10023
	codeStorageResources  = 10047
	codeMessageTooLarge   = 10054
	CodeWrongLastSeq      = 10071
	CodeNoReplicas        = 10074
	codeStoreFailed       = 10077
	CodeWrongLastSeqConst = 10164
	CodeTooManyRequests   = 10167
	CodeIncompleteBatch   = 10176
	CodeTooManyBatches    = 10210
)

// ErrUnanswered means that the servers do not answer, so that it is not known what they have.
var ErrUnanswered = errors.New("the servers do not answer")

// ErrNoAnswer means that no server has answered within the time of the request.
var ErrNoAnswer = errors.New("no answer")

// IsUnanswered reports whether an error means that no server has answered, or one has that has no leader to ask or that cannot reach the
// others, as while they start.
func IsUnanswered(err error) bool {
	var apiErr *jetstream.APIError
	if errors.As(err, &apiErr) && (apiErr.ErrorCode == codeUnavailable || apiErr.ErrorCode == CodeNoPeers && strings.Contains(apiErr.Description, "peer offline")) {
		return true
	}
	return errors.Is(err, ErrNoAnswer) || errors.Is(err, jetstream.ErrNoStreamResponse) || errors.Is(err, nats.ErrNoResponders) || IsDisconnected(err)
}

// IsDisconnected reports whether a request was not sent, because there was no connection.
func IsDisconnected(err error) bool {
	return errors.Is(err, nats.ErrReconnectBufExceeded) || errors.Is(err, nats.ErrConnectionReconnecting)
}

// IsWrongLastSeq reports whether an error means that a stream has another last entry than the message required.
func IsWrongLastSeq(err error) bool {
	var apiErr *jetstream.APIError
	return errors.As(err, &apiErr) && (apiErr.ErrorCode == CodeWrongLastSeq || apiErr.ErrorCode == CodeWrongLastSeqConst)
}

// IsNoSpace reports whether a code means that a stream is full.
func IsNoSpace(code jetstream.ErrorCode) bool {
	return slices.Contains([]jetstream.ErrorCode{codeAccountResources, codeInsufficient, codeStorageResources, codeStoreFailed, codeMessageTooLarge}, code)
}

// RefusedForSpace returns the description of an error that means that a stream is full.
func RefusedForSpace(err error) (description string, ok bool) {
	var apiErr *jetstream.APIError
	if errors.As(err, &apiErr) && IsNoSpace(apiErr.ErrorCode) {
		return apiErr.Description, true
	}
	return "", false
}
