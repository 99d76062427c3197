package consolidate

import (
	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// Recorder records the calls that change trackers, so that Replay can repeat them. What a call does follows from the tracker, the call, and
// checks against bounds, which depend on other workers and on the configuration. The Recorder records the failed checks too.
//
// The zero value is ready. A Recorder is not safe for concurrent use.
type Recorder struct {
	calls   []byte // encoded TrackerCalls
	scratch []byte // reused for one call
	// removed are the block hashes of the last calls of Remove, which become one TrackerCall.
	removed    []uint64
	removedKey removedKey
	checks     checks // of the current Store
}

// removedKey is what calls of Remove have in common that become one TrackerCall.
type removedKey struct {
	rank   uint32
	source int
	op     copies.Op
}

// maxIdleCalls is the largest buffer in bytes that a Recorder keeps.
const maxIdleCalls = 64 << 10

// RecordTo records the following calls in r as those of a dp rank.
func (t *Tracker) RecordTo(r *Recorder, rank uint32) {
	t.recorder, t.rank, t.checks = r, rank, &r.checks
}

// Calls returns the calls recorded since it was last called, an encoded kvcast.state.v1.TrackerCalls, valid until the next recorded call.
func (r *Recorder) Calls() []byte {
	r.endRemoves()
	calls := r.calls
	if r.calls = calls[:0]; cap(calls) > maxIdleCalls {
		r.calls = nil
	}
	return calls
}

// store records a call of Store when it has ended.
func (r *Recorder) store(rank uint32, source int, e *wire.Event, op copies.Op) {
	b := r.begin(statev1.TrackerCall_KIND_STORE, rank, source)
	b = encode.AppendUint(b, statev1.TrackerCallOpField, uint64(op))
	b = encode.AppendHashes(b, statev1.TrackerCallBlockHashesField, e.BlockHashes)
	if e.HasParent {
		b = encode.AppendOptionalFixed64(b, statev1.TrackerCallParentHashField, e.Parent)
	}
	if len(e.TokensHashes) == len(e.BlockHashes) {
		b = encode.AppendHashes(b, statev1.TrackerCallTokensHashesField, e.TokensHashes)
		b = encode.AppendString(b, statev1.TrackerCallLoraNameField, e.LoRAName)
		b = encode.AppendString(b, statev1.TrackerCallCacheSaltField, e.CacheSalt)
	}
	r.end(encode.AppendUint32s(b, statev1.TrackerCallFailedChecksField, r.checks.failed))
	if r.checks = (checks{failed: r.checks.failed[:0]}); cap(r.checks.failed) > maxIdleRemoved {
		r.checks.failed = nil
	}
}

// remove records a call of Remove.
func (r *Recorder) remove(rank uint32, source int, hash uint64, op copies.Op) {
	if key := (removedKey{rank, source, op}); key != r.removedKey || len(r.removed) == maxIdleRemoved {
		r.endRemoves()
		r.removedKey = key
	}
	r.removed = append(r.removed, hash)
}

// endRemoves encodes the last calls of Remove, if there are any.
func (r *Recorder) endRemoves() {
	if len(r.removed) == 0 {
		return
	}
	hashes := r.removed
	r.removed = r.removed[:0]
	b := r.begin(statev1.TrackerCall_KIND_REMOVE, r.removedKey.rank, r.removedKey.source)
	b = encode.AppendUint(b, statev1.TrackerCallOpField, uint64(r.removedKey.op))
	r.end(encode.AppendHashes(b, statev1.TrackerCallBlockHashesField, hashes))
}

// removeBlocks records a call of RemoveBlocks.
func (r *Recorder) removeBlocks(rank uint32, routerHashes []uint64) {
	b := r.begin(statev1.TrackerCall_KIND_REMOVE_BLOCKS, rank, 0)
	r.end(encode.AppendHashes(b, statev1.TrackerCallBlockHashesField, routerHashes))
}

// call records a call without further arguments, unless r is nil.
func (r *Recorder) call(kind statev1.TrackerCall_Kind, rank uint32, source int) {
	if r != nil {
		r.end(r.begin(kind, rank, source))
	}
}

// begin returns the beginning of an encoded call, to which the caller appends its fields.
func (r *Recorder) begin(kind statev1.TrackerCall_Kind, rank uint32, source int) []byte {
	r.endRemoves()
	b := encode.AppendUint(r.scratch[:0], statev1.TrackerCallKindField, uint64(kind))
	b = encode.AppendUint(b, statev1.TrackerCallRankField, uint64(rank))
	return encode.AppendUint(b, statev1.TrackerCallSourceField, uint64(source))
}

// end adds an encoded call.
func (r *Recorder) end(call []byte) {
	r.calls = append(encode.AppendLength(r.calls, statev1.TrackerCallsCallsField, len(call)), call...)
	if r.scratch = call; cap(call) > maxIdleCalls {
		r.scratch = nil
	}
}

// checks are the outcomes of a Store's checks against bounds: recorded, or those of a recorded call that is replayed.
type checks struct {
	n        uint32   // made so far
	failed   []uint32 // numbers, from 0, of those that failed, and in a replay of those that will fail
	replayed bool
}

// check returns the outcome of a check against a bound, which is ok unless a recorded call is replayed.
func (t *Tracker) check(ok bool) bool {
	if t.checks == nil {
		return ok
	}
	return t.checks.next(ok)
}

func (c *checks) next(ok bool) bool {
	if c.replayed {
		if ok = !c.failsNext(); !ok {
			c.failed = c.failed[1:]
		}
	} else if !ok {
		c.failed = append(c.failed, c.n)
	}
	c.n++
	return ok
}

// failsNext reports whether the next check is known to fail.
func (c *checks) failsNext() bool {
	return c != nil && c.replayed && len(c.failed) > 0 && c.failed[0] == c.n
}
