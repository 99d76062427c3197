package statev1

import "google.golang.org/protobuf/encoding/protowire"

// Field numbers of messages that the pipeline encodes without generated code. A test compares the encoding with that of
// generated code.
const (
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
