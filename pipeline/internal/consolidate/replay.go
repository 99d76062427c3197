package consolidate

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// Replay repeats calls that Recorder.Calls has returned, on the trackers of their dp ranks. If these have the state that the recorded
// trackers had when Calls was called before, they get the state that the recorded trackers had when it returned the calls, whatever their
// bounds: units are reserved even beyond the limits of the budgets. Replay records no calls, and the trackers queue no changes, but count
// as during the recorded calls.
//
// tracker returns the tracker of a rank; nil is an error. If Replay returns an error, which is for invalid
// calls, some calls may have been repeated.
func Replay(calls []byte, tracker func(rank uint32) *Tracker) error {
	var f encode.Field
	for n := 1; len(calls) > 0; n++ {
		rest, err := f.Next(calls)
		if err != nil {
			return fmt.Errorf("decode call %d of consolidated sources: %w", n, err)
		}
		calls = rest
		if !f.IsBytes(statev1.TrackerCallsCallsField) {
			continue
		}
		if err := replay(f.Bytes, tracker); err != nil {
			return fmt.Errorf("replay call %d of consolidated sources: %w", n, err)
		}
	}
	return nil
}

func replay(encoded []byte, tracker func(rank uint32) *Tracker) error {
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
