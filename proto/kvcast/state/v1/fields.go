// Package statev1 has the messages kvcast.state.v1, in which kvcast stores state beside a durable journal. They are not part of
// the contract with routers. buf generates them from the .proto files in this folder. fields.go has the numbers of the fields
// that kvcast encodes without generated code.
package statev1

import "google.golang.org/protobuf/encoding/protowire"

// Field numbers of messages that the hot path encodes without generated code. A test compares them with
// the descriptors.
const (
	TrackerBlockScopesField      protowire.Number = 7
	TrackerBlockRouterNamesField protowire.Number = 9
	TrackerBlockLiveNamesField   protowire.Number = 11
	TrackerBlockIdleNamesField   protowire.Number = 12
	TrackerNameFlagsField        protowire.Number = 14

	TrackerCallsCallsField protowire.Number = 1

	TrackerCallKindField         protowire.Number = 1
	TrackerCallRankField         protowire.Number = 2
	TrackerCallSourceField       protowire.Number = 3
	TrackerCallOpField           protowire.Number = 4
	TrackerCallBlockHashesField  protowire.Number = 5
	TrackerCallTokensHashesField protowire.Number = 6
	TrackerCallParentHashField   protowire.Number = 7
	TrackerCallLoraNameField     protowire.Number = 8
	TrackerCallCacheSaltField    protowire.Number = 9
	TrackerCallFailedChecksField protowire.Number = 10

	IngestCursorVersionField         protowire.Number = 1
	IngestCursorSeqField             protowire.Number = 2
	IngestCursorBatchAgeField        protowire.Number = 3
	IngestCursorBatchTimeField       protowire.Number = 4
	IngestCursorBatchHashField       protowire.Number = 5
	IngestCursorRawEventIDField      protowire.Number = 6
	IngestCursorEpochField           protowire.Number = 7
	IngestCursorPublisherIDField     protowire.Number = 8
	IngestCursorRestartedField       protowire.Number = 9
	IngestCursorPossibleRestartField protowire.Number = 10
	IngestCursorConflictedField      protowire.Number = 11
	IngestCursorHasReplayField       protowire.Number = 12
	IngestCursorIncompleteField      protowire.Number = 13
	IngestCursorRanksField           protowire.Number = 14
	IngestCursorBeforeFirstField     protowire.Number = 15
	IngestCursorBeforeLastField      protowire.Number = 16
)
