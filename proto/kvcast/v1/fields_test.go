package kvcastv1_test

import (
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

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
