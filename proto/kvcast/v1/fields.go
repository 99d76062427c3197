// Package kvcastv1 is the gRPC contract kvcast.v1: messages and services that buf generates from
// the .proto files beside it, and the numbers of the fields that are encoded by hand.
package kvcastv1

import "google.golang.org/protobuf/encoding/protowire"

// Field numbers of the messages that are encoded or read by hand on the hot path.
// A test compares them with the descriptors.
const (
	EntrySeqField                protowire.Number = 1
	EntryWorkerField             protowire.Number = 2
	EntryModelField              protowire.Number = 3
	EntryEngineTimeUnixNanoField protowire.Number = 4
	EntryIngestTimeUnixNanoField protowire.Number = 5
	EntryEventsField             protowire.Number = 6

	RouterEventEventIDField protowire.Number = 1
	RouterEventDpRankField  protowire.Number = 2
	RouterEventTierField    protowire.Number = 3
	RouterEventStoredField  protowire.Number = 4
	RouterEventRemovedField protowire.Number = 5

	StoredParentHashField   protowire.Number = 1
	StoredBlockHashesField  protowire.Number = 2
	StoredTokensHashesField protowire.Number = 3
	StoredBlockSizeField    protowire.Number = 4
	StoredLoraNameField     protowire.Number = 5
	StoredTokenIDsField     protowire.Number = 6

	RemovedBlockHashesField protowire.Number = 1

	SnapshotBlocksWorkerField protowire.Number = 1
	SnapshotBlocksEventsField protowire.Number = 2

	// SubscribeResponse, ReplayResponse and SnapshotResponse share these numbers, so
	// that one encoding serves all three; ReplayResponse has no snapshot blocks.
	ResponseEntriesField        protowire.Number = 1
	ResponseSnapshotBlocksField protowire.Number = 8
)
