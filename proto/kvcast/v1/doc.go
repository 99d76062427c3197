// Package kvcastv1 is the gRPC contract kvcast.v1. buf generates the messages and services from the .proto files in
// this folder, and the numbers of the fields that kvcast encodes or reads without generated code.
package kvcastv1

// The numbers of entries and snapshot blocks are the same in SubscribeResponse, ReplayResponse and SnapshotResponse, so that
// the server encodes entries once for all three. ReplayResponse has no snapshot blocks.
const (
	ResponseEntriesField        = SubscribeResponseEntriesField
	ResponseSnapshotBlocksField = SubscribeResponseSnapshotBlocksField
)
