package consolidate

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// Replay repeats calls that Recorder.AppendCalls has appended, on the trackers of their dp ranks. If
// these have the state that the recorded trackers had when AppendCalls was called before, they get
// the state that the recorded trackers had when it appended the calls, whatever their bounds:
// units are reserved even beyond the limits of the budgets. Replay records no calls, and the
// trackers queue no changes, but count as during the recorded calls.
//
// tracker returns the tracker of a rank; nil is an error. If Replay returns an error, which is for invalid
// calls, some calls may have been repeated.
func Replay(calls []byte, tracker func(rank uint32) *Tracker) error {
	for n := 1; len(calls) > 0; n++ {
		call, length := consumeCall(calls)
		if length < 0 {
			return fmt.Errorf("decode call %d of consolidated sources: %w", n, protowire.ParseError(length))
		}
		calls = calls[length:]
		if err := replay(call, tracker); err != nil {
			return fmt.Errorf("replay call %d of consolidated sources: %w", n, err)
		}
	}
	return nil
}

// consumeCall returns the first call of encoded TrackerCalls, and the length of its field, or a
// negative length that is an error of protowire. The call is nil if the field is unknown.
func consumeCall(b []byte) (call []byte, length int) {
	number, wireType, length := protowire.ConsumeTag(b)
	if length < 0 {
		return nil, length
	}
	if number != statev1.TrackerCallsCallsField || wireType != protowire.BytesType {
		n := protowire.ConsumeFieldValue(number, wireType, b[length:])
		if n < 0 {
			return nil, n
		}
		return nil, length + n
	}
	call, n := protowire.ConsumeBytes(b[length:])
	if n < 0 {
		return nil, n
	}
	return call, length + n
}

func replay(encoded []byte, tracker func(rank uint32) *Tracker) error {
	if encoded == nil {
		return nil
	}
	call := new(statev1.TrackerCall)
	if err := proto.Unmarshal(encoded, call); err != nil {
		return err
	}
	t := tracker(call.GetRank())
	if t == nil {
		return fmt.Errorf("no sources of dp rank %d", call.GetRank())
	}
	if int64(call.GetSource()) >= int64(t.sources) {
		return fmt.Errorf("source %d of %d", call.GetSource(), t.sources)
	}
	script := checks{failed: call.GetFailedChecks(), replayed: true}
	recorder, recorded := t.recorder, t.checks
	t.recorder, t.checks = nil, &script
	var err error
	t.withoutLimit(func() { err = t.apply(call) })
	t.recorder, t.checks = recorder, recorded
	t.changes, t.removed = t.changes[:0], t.removed[:0]
	if err == nil && len(script.failed) > 0 {
		err = fmt.Errorf("check %d failed, of %d", script.failed[0], script.n)
	}
	return err
}

// apply makes a recorded call.
func (t *Tracker) apply(call *statev1.TrackerCall) error {
	source, op, hashes := int(call.GetSource()), copies.Op(call.GetOp()), call.GetBlockHashes()
	switch call.GetKind() {
	case statev1.TrackerCall_KIND_STORE:
		tokens := call.GetTokensHashes()
		if len(tokens) != 0 && len(tokens) != len(hashes) {
			return fmt.Errorf("%d tokens hashes of %d blocks", len(tokens), len(hashes))
		}
		t.Store(source, &wire.Event{
			BlockHashes: hashes, TokensHashes: tokens, HasParent: call.ParentHash != nil, Parent: call.GetParentHash(),
			LoRAName: call.GetLoraName(), CacheSalt: string(call.GetCacheSalt()),
		}, op)
	case statev1.TrackerCall_KIND_REMOVE:
		for _, hash := range hashes {
			t.Remove(source, hash, op)
		}
	case statev1.TrackerCall_KIND_CLEAR_SOURCE:
		t.ClearSource(source)
	case statev1.TrackerCall_KIND_GAP:
		t.Gap(source)
	case statev1.TrackerCall_KIND_COUNT_CHILDREN:
		t.CountChildren(source)
	case statev1.TrackerCall_KIND_REMOVE_BLOCKS:
		t.RemoveBlocks(hashes)
	case statev1.TrackerCall_KIND_RESET:
		t.Reset()
	default:
		return errors.New("unknown kind of call; it was recorded by a later version")
	}
	return nil
}
