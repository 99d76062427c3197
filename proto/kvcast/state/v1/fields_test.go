package statev1_test

import (
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"

	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

func TestFieldNumbersMatchDescriptors(t *testing.T) {
	type fields map[protoreflect.Name]protowire.Number
	for _, tt := range []struct {
		message protoreflect.ProtoMessage
		fields  fields
	}{
		{&statev1.Tracker{}, fields{
			"block_scopes":       statev1.TrackerBlockScopesField,
			"block_router_names": statev1.TrackerBlockRouterNamesField,
			"block_live_names":   statev1.TrackerBlockLiveNamesField,
			"block_idle_names":   statev1.TrackerBlockIdleNamesField,
			"name_flags":         statev1.TrackerNameFlagsField,
		}},
		{&statev1.TrackerCalls{}, fields{"calls": statev1.TrackerCallsCallsField}},
		{&statev1.TrackerCall{}, fields{
			"kind":          statev1.TrackerCallKindField,
			"rank":          statev1.TrackerCallRankField,
			"source":        statev1.TrackerCallSourceField,
			"op":            statev1.TrackerCallOpField,
			"block_hashes":  statev1.TrackerCallBlockHashesField,
			"tokens_hashes": statev1.TrackerCallTokensHashesField,
			"parent_hash":   statev1.TrackerCallParentHashField,
			"lora_name":     statev1.TrackerCallLoraNameField,
			"cache_salt":    statev1.TrackerCallCacheSaltField,
			"failed_checks": statev1.TrackerCallFailedChecksField,
		}},
		{&statev1.IngestCursor{}, fields{
			"version":          statev1.IngestCursorVersionField,
			"seq":              statev1.IngestCursorSeqField,
			"batch_age":        statev1.IngestCursorBatchAgeField,
			"batch_time":       statev1.IngestCursorBatchTimeField,
			"batch_hash":       statev1.IngestCursorBatchHashField,
			"raw_event_id":     statev1.IngestCursorRawEventIDField,
			"epoch":            statev1.IngestCursorEpochField,
			"publisher_id":     statev1.IngestCursorPublisherIDField,
			"restarted":        statev1.IngestCursorRestartedField,
			"possible_restart": statev1.IngestCursorPossibleRestartField,
			"conflicted":       statev1.IngestCursorConflictedField,
			"has_replay":       statev1.IngestCursorHasReplayField,
			"incomplete":       statev1.IngestCursorIncompleteField,
			"ranks":            statev1.IngestCursorRanksField,
			"before_first":     statev1.IngestCursorBeforeFirstField,
			"before_last":      statev1.IngestCursorBeforeLastField,
			"restoring":        statev1.IngestCursorRestoringField,
			"proved":           statev1.IngestCursorProvedField,
			"unproved":         statev1.IngestCursorUnprovedField,
		}},
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
