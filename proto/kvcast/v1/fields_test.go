package kvcastv1_test

import (
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

func TestFieldNumbersMatchDescriptors(t *testing.T) {
	type fields map[protoreflect.Name]protowire.Number
	response := fields{
		"entries":         kvcastv1.ResponseEntriesField,
		"snapshot_blocks": kvcastv1.ResponseSnapshotBlocksField,
	}
	for _, tt := range []struct {
		message protoreflect.ProtoMessage
		fields  fields
	}{
		{&kvcastv1.Entry{}, fields{
			"seq":                   kvcastv1.EntrySeqField,
			"worker":                kvcastv1.EntryWorkerField,
			"model":                 kvcastv1.EntryModelField,
			"engine_time_unix_nano": kvcastv1.EntryEngineTimeUnixNanoField,
			"ingest_time_unix_nano": kvcastv1.EntryIngestTimeUnixNanoField,
			"events":                kvcastv1.EntryEventsField,
		}},
		{&kvcastv1.RouterEvent{}, fields{
			"event_id":       kvcastv1.RouterEventEventIDField,
			"dp_rank":        kvcastv1.RouterEventDpRankField,
			"tier":           kvcastv1.RouterEventTierField,
			"stored":         kvcastv1.RouterEventStoredField,
			"removed":        kvcastv1.RouterEventRemovedField,
			"worker_added":   kvcastv1.RouterEventWorkerAddedField,
			"worker_removed": kvcastv1.RouterEventWorkerRemovedField,
			"group_stored":   kvcastv1.RouterEventGroupStoredField,
			"group_removed":  kvcastv1.RouterEventGroupRemovedField,
		}},
		{&kvcastv1.GroupStored{}, fields{
			"group":        kvcastv1.GroupBlocksGroupField,
			"block_hashes": kvcastv1.GroupBlocksBlockHashesField,
		}},
		{&kvcastv1.GroupRemoved{}, fields{
			"group":        kvcastv1.GroupBlocksGroupField,
			"block_hashes": kvcastv1.GroupBlocksBlockHashesField,
		}},
		{&kvcastv1.Stored{}, fields{
			"parent_hash":   kvcastv1.StoredParentHashField,
			"block_hashes":  kvcastv1.StoredBlockHashesField,
			"tokens_hashes": kvcastv1.StoredTokensHashesField,
			"block_size":    kvcastv1.StoredBlockSizeField,
			"lora_name":     kvcastv1.StoredLoraNameField,
			"token_ids":     kvcastv1.StoredTokenIDsField,
		}},
		{&kvcastv1.Removed{}, fields{"block_hashes": kvcastv1.RemovedBlockHashesField}},
		{&kvcastv1.SnapshotBlocks{}, fields{
			"worker": kvcastv1.SnapshotBlocksWorkerField,
			"events": kvcastv1.SnapshotBlocksEventsField,
		}},
		{&kvcastv1.Position{}, fields{"epoch": kvcastv1.PositionEpochField, "seq": kvcastv1.PositionSeqField}},
		{&kvcastv1.MatchPrefixesRequest{}, fields{
			"id":       kvcastv1.MatchPrefixesRequestIDField,
			"request":  kvcastv1.MatchPrefixesRequestRequestField,
			"outcomes": kvcastv1.MatchPrefixesRequestOutcomesField,
		}},
		{&kvcastv1.MatchPrefixRequest{}, fields{
			"model":         kvcastv1.MatchPrefixRequestModelField,
			"prompts":       kvcastv1.MatchPrefixRequestPromptsField,
			"workers":       kvcastv1.MatchPrefixRequestWorkersField,
			"limit":         kvcastv1.MatchPrefixRequestLimitField,
			"after":         kvcastv1.MatchPrefixRequestAfterField,
			"max_wait_nano": kvcastv1.MatchPrefixRequestMaxWaitNanoField,
		}},
		{&kvcastv1.Prompt{}, fields{
			"token_ids":     kvcastv1.PromptTokenIDsField,
			"tokens_hashes": kvcastv1.PromptTokensHashesField,
			"block_hashes":  kvcastv1.PromptBlockHashesField,
			"lora_name":     kvcastv1.PromptLoraNameField,
			"cache_salt":    kvcastv1.PromptCacheSaltField,
			"eagle":         kvcastv1.PromptEagleField,
			"block_size":    kvcastv1.PromptBlockSizeField,
		}},
		{&kvcastv1.MatchPrefixesResponse{}, fields{
			"id":       kvcastv1.MatchPrefixesResponseIDField,
			"response": kvcastv1.MatchPrefixesResponseResponseField,
		}},
		{&kvcastv1.MatchPrefixResponse{}, fields{
			"position": kvcastv1.MatchPrefixResponsePositionField,
			"prompts":  kvcastv1.MatchPrefixResponsePromptsField,
		}},
		{&kvcastv1.PromptMatches{}, fields{"matches": kvcastv1.PromptMatchesMatchesField}},
		{&kvcastv1.PrefixMatch{}, fields{
			"worker":    kvcastv1.PrefixMatchWorkerField,
			"endpoint":  kvcastv1.PrefixMatchEndpointField,
			"dp_rank":   kvcastv1.PrefixMatchDpRankField,
			"blocks":    kvcastv1.PrefixMatchBlocksField,
			"tokens":    kvcastv1.PrefixMatchTokensField,
			"tiers":     kvcastv1.PrefixMatchTiersField,
			"trust":     kvcastv1.PrefixMatchTrustField,
			"reasons":   kvcastv1.PrefixMatchReasonsField,
			"down_nano": kvcastv1.PrefixMatchDownNanoField,
			"age_nano":  kvcastv1.PrefixMatchAgeNanoField,
			"model":     kvcastv1.PrefixMatchModelField,
		}},
		{&kvcastv1.TierPrefix{}, fields{
			"tier":    kvcastv1.TierPrefixTierField,
			"blocks":  kvcastv1.TierPrefixBlocksField,
			"tokens":  kvcastv1.TierPrefixTokensField,
			"trust":   kvcastv1.TierPrefixTrustField,
			"reasons": kvcastv1.TierPrefixReasonsField,
		}},
		{&kvcastv1.SubscribeResponse{}, response},
		{&kvcastv1.SnapshotResponse{}, response},
		{&kvcastv1.ReplayResponse{}, fields{"entries": kvcastv1.ResponseEntriesField}},
	} {
		message := tt.message.ProtoReflect().Descriptor()
		for name, got := range tt.fields {
			field := message.Fields().ByName(name)
			if field == nil {
				t.Errorf("%s has no field %s", message.FullName(), name)
			} else if want := field.Number(); got != want {
				t.Errorf("%s.%s: got field number %d, want %d", message.FullName(), name, got, want)
			}
		}
	}
}

// TestResponsesShareFieldNumbers compares the fields of the responses. The server encodes all responses as a
// SubscribeResponse.
func TestResponsesShareFieldNumbers(t *testing.T) {
	shared := (&kvcastv1.SubscribeResponse{}).ProtoReflect().Descriptor().Fields()
	for _, m := range []protoreflect.ProtoMessage{&kvcastv1.ReplayResponse{}, &kvcastv1.SnapshotResponse{}} {
		fields := m.ProtoReflect().Descriptor().Fields()
		for i := range fields.Len() {
			field := fields.Get(i)
			if want := shared.ByName(field.Name()); want == nil || field.Number() != want.Number() {
				t.Errorf("%s: got field number %d, want that of %v", field.FullName(), field.Number(), want)
			}
		}
	}
}
