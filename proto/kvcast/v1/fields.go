// Package kvcastv1 is the gRPC contract kvcast.v1. buf generates the messages and services from the .proto files in
// this folder. fields.go has the numbers of the fields that kvcast encodes without generated code.
package kvcastv1

import "google.golang.org/protobuf/encoding/protowire"

// Field numbers of messages that the hot path encodes or reads without generated code. A test compares them with
// the descriptors.
const (
	EntrySeqField                protowire.Number = 1
	EntryWorkerField             protowire.Number = 2
	EntryModelField              protowire.Number = 3
	EntryEngineTimeUnixNanoField protowire.Number = 4
	EntryIngestTimeUnixNanoField protowire.Number = 5
	EntryEventsField             protowire.Number = 6

	RouterEventEventIDField       protowire.Number = 1
	RouterEventDpRankField        protowire.Number = 2
	RouterEventTierField          protowire.Number = 3
	RouterEventStoredField        protowire.Number = 4
	RouterEventRemovedField       protowire.Number = 5
	RouterEventWorkerAddedField   protowire.Number = 8
	RouterEventWorkerRemovedField protowire.Number = 9
	RouterEventGroupStoredField   protowire.Number = 13
	RouterEventGroupRemovedField  protowire.Number = 14

	StoredParentHashField   protowire.Number = 1
	StoredBlockHashesField  protowire.Number = 2
	StoredTokensHashesField protowire.Number = 3
	StoredBlockSizeField    protowire.Number = 4
	StoredLoraNameField     protowire.Number = 5
	StoredTokenIDsField     protowire.Number = 6

	RemovedBlockHashesField protowire.Number = 1

	// The numbers are the same in GroupStored and GroupRemoved.
	GroupBlocksGroupField       protowire.Number = 1
	GroupBlocksBlockHashesField protowire.Number = 2

	SnapshotBlocksWorkerField protowire.Number = 1
	SnapshotBlocksEventsField protowire.Number = 2

	// The numbers are the same in SubscribeResponse, ReplayResponse and SnapshotResponse, so that the server
	// encodes entries once for all three. ReplayResponse has no snapshot blocks.
	ResponseEntriesField        protowire.Number = 1
	ResponseSnapshotBlocksField protowire.Number = 8

	PositionEpochField protowire.Number = 1
	PositionSeqField   protowire.Number = 2

	MatchPrefixesRequestIDField       protowire.Number = 1
	MatchPrefixesRequestRequestField  protowire.Number = 2
	MatchPrefixesRequestOutcomesField protowire.Number = 3

	ReportOutcomeRequestOutcomesField protowire.Number = 1

	MatchPrefixRequestModelField       protowire.Number = 1
	MatchPrefixRequestPromptsField     protowire.Number = 2
	MatchPrefixRequestWorkersField     protowire.Number = 3
	MatchPrefixRequestLimitField       protowire.Number = 4
	MatchPrefixRequestAfterField       protowire.Number = 5
	MatchPrefixRequestMaxWaitNanoField protowire.Number = 6

	PromptTokenIDsField     protowire.Number = 1
	PromptTokensHashesField protowire.Number = 2
	PromptBlockHashesField  protowire.Number = 3
	PromptLoraNameField     protowire.Number = 4
	PromptCacheSaltField    protowire.Number = 5
	PromptEagleField        protowire.Number = 6
	PromptBlockSizeField    protowire.Number = 7
	PromptExcludeLastField  protowire.Number = 8

	MatchPrefixesResponseIDField       protowire.Number = 1
	MatchPrefixesResponseResponseField protowire.Number = 2

	MatchPrefixResponsePositionField protowire.Number = 1
	MatchPrefixResponsePromptsField  protowire.Number = 2

	PromptMatchesMatchesField protowire.Number = 1

	PrefixMatchWorkerField   protowire.Number = 1
	PrefixMatchEndpointField protowire.Number = 2
	PrefixMatchDpRankField   protowire.Number = 3
	PrefixMatchBlocksField   protowire.Number = 4
	PrefixMatchTokensField   protowire.Number = 5
	PrefixMatchTiersField    protowire.Number = 6
	PrefixMatchTrustField    protowire.Number = 7
	PrefixMatchReasonsField  protowire.Number = 8
	PrefixMatchDownNanoField protowire.Number = 9
	PrefixMatchAgeNanoField  protowire.Number = 11
	PrefixMatchModelField    protowire.Number = 10

	TierPrefixTierField    protowire.Number = 1
	TierPrefixBlocksField  protowire.Number = 2
	TierPrefixTokensField  protowire.Number = 3
	TierPrefixTrustField   protowire.Number = 4
	TierPrefixReasonsField protowire.Number = 5
)
