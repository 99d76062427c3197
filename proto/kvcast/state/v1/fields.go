// Package statev1 has the messages kvcast.state.v1, in which kvcast stores state beside a durable journal. They are not part of
// the contract with routers. buf generates them from the .proto files in this folder. fields.go has the numbers of the fields
// that kvcast encodes without generated code.
package statev1

import "google.golang.org/protobuf/encoding/protowire"

// Field numbers of messages that the hot path encodes without generated code. Tests compare them with the descriptors, or the
// encoding with that of generated code.
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
	IngestCursorRestoringField       protowire.Number = 17
	IngestCursorProvedField          protowire.Number = 18
	IngestCursorUnprovedField        protowire.Number = 19
	IngestCursorLostField            protowire.Number = 20

	EntryStateVersionField       protowire.Number = 1
	EntryStatePartialField       protowire.Number = 2
	EntryStateContinuesField     protowire.Number = 3
	EntryStateFirstChangeField   protowire.Number = 4
	EntryStateChangesField       protowire.Number = 5
	EntryStateCursorsField       protowire.Number = 6
	EntryStateRawEventIDsField   protowire.Number = 7
	EntryStateAnnouncementsField protowire.Number = 8
	EntryStateSourcesField       protowire.Number = 9
	EntryStatePendingField       protowire.Number = 10
	EntryStateWorkerField        protowire.Number = 11

	ChangeEventsBeforeField      protowire.Number = 1
	ChangeSuppressedRemovesField protowire.Number = 2
	ChangeStoreOpsField          protowire.Number = 3
	ChangeStaleTiersField        protowire.Number = 4
	ChangeTrackerCallsField      protowire.Number = 5
	ChangeLearnedField           protowire.Number = 6

	SuppressedRemovesDpRankField      protowire.Number = 1
	SuppressedRemovesTierField        protowire.Number = 2
	SuppressedRemovesOpField          protowire.Number = 3
	SuppressedRemovesBlockHashesField protowire.Number = 4
	SuppressedRemovesGroupField       protowire.Number = 5

	CopyOpsLengthsField protowire.Number = 1
	CopyOpsOpsField     protowire.Number = 2

	StaleTiersDpRankField protowire.Number = 1
	StaleTiersTiersField  protowire.Number = 2

	CursorSourceField protowire.Number = 1
	CursorDpRankField protowire.Number = 2
	CursorCursorField protowire.Number = 3

	RawEventIDSourceField protowire.Number = 1
	RawEventIDIDField     protowire.Number = 2

	CheckpointTablesField protowire.Number = 4

	TableBlockHashesField   protowire.Number = 4
	TableParentHashesField  protowire.Number = 5
	TableBlockInfoField     protowire.Number = 6
	TableCopiedHashesField  protowire.Number = 7
	TableFurtherCopiesField protowire.Number = 8
	TableUnsureStoresField  protowire.Number = 9
)
