package lmcachezmq

import (
	"fmt"

	"github.com/tinylib/msgp/msgp"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	lmcachev1 "github.com/kvcast/kvcast/internal/peer/lmcache/v1"
)

// readPing returns the instance of a PingRequest.
func readPing(request []byte) (int64, error) {
	var r lmcachev1.PingRequest
	err := proto.Unmarshal(request, &r)
	return r.GetInstanceId(), err
}

// readSubscribe returns the arguments of subscribe_kv_events, from a SubscribeKvEventsRequest.
func readSubscribe(request []byte) ([][]byte, error) {
	var r lmcachev1.SubscribeKvEventsRequest
	if err := proto.Unmarshal(request, &r); err != nil {
		return nil, err
	}
	return [][]byte{
		msgp.AppendInt64(nil, r.GetInstanceId()), msgp.AppendString(nil, r.GetModelName()),
		msgp.AppendInt64(nil, r.GetCursor()), msgp.AppendInt64(nil, r.GetMaxEvents()),
	}, nil
}

// appendBatch appends the KVEventBatch that a result has. Values that are not used are left out.
func appendBatch(dst, result []byte) ([]byte, error) {
	_, err := eachField(result, func(name string, value []byte) (rest []byte, err error) {
		switch name {
		case "enabled":
			dst, rest, err = appendBool(dst, lmcachev1.KVEventBatchEnabledField, value)
		case "incarnation":
			dst, rest, err = appendInt(dst, lmcachev1.KVEventBatchIncarnationField, value)
		case "next_cursor":
			dst, rest, err = appendInt(dst, lmcachev1.KVEventBatchNextCursorField, value)
		case "lost":
			dst, rest, err = appendBool(dst, lmcachev1.KVEventBatchLostField, value)
		case "events":
			var record []byte
			rest, err = eachElement(value, func(element []byte) (rest []byte, err error) {
				if record, rest, err = appendRecord(record[:0], element); err == nil {
					dst = appendField(dst, lmcachev1.KVEventBatchEventsField, record)
				}
				return rest, err
			})
		default:
			rest, err = msgp.Skip(value)
		}
		return rest, err
	})
	return dst, err
}

// appendRecord appends the KVEventRecord that begins a value, and returns what follows it.
func appendRecord(dst, value []byte) (_, rest []byte, err error) {
	var tokens []byte
	rest, err = eachField(value, func(name string, value []byte) (rest []byte, err error) {
		switch name {
		case "seq":
			dst, rest, err = appendInt(dst, lmcachev1.KVEventRecordSeqField, value)
		case "kind":
			var kind []byte
			if kind, rest, err = msgp.ReadStringZC(value); err == nil {
				dst = appendField(dst, lmcachev1.KVEventRecordKindField, kind)
			}
		case "block_hashes":
			rest, err = eachElement(value, func(element []byte) (rest []byte, err error) {
				dst, rest, err = appendBytes(dst, lmcachev1.KVEventRecordBlockHashesField, element)
				return rest, err
			})
		case "parent_block_hash":
			if rest, err = msgp.ReadNilBytes(value); err != nil {
				dst, rest, err = appendBytes(dst, lmcachev1.KVEventRecordParentBlockHashField, value)
			}
		case "token_ids":
			rest, err = eachElement(value, func(element []byte) (rest []byte, err error) {
				var token uint64
				if token, rest, err = msgp.ReadUint64Bytes(element); err == nil {
					tokens = protowire.AppendVarint(tokens, token)
				}
				return rest, err
			})
		default:
			rest, err = msgp.Skip(value)
		}
		return rest, err
	})
	if err == nil && len(tokens) > 0 {
		dst = appendField(dst, lmcachev1.KVEventRecordTokenIDsField, tokens)
	}
	return dst, rest, err
}

// eachField calls f with the name and the value of each field of the map that begins b. f returns what follows the value.
func eachField(b []byte, f func(name string, value []byte) (rest []byte, err error)) (rest []byte, err error) {
	n, b, err := msgp.ReadMapHeaderBytes(b)
	for ; n > 0 && err == nil; n-- {
		var key []byte
		if key, b, err = msgp.ReadMapKeyZC(b); err == nil {
			name := string(key)
			if b, err = f(name, b); err != nil {
				err = fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return b, err
}

// eachElement calls f with each element of the array that begins b. f returns what follows the element.
func eachElement(b []byte, f func(element []byte) (rest []byte, err error)) (rest []byte, err error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	for ; n > 0 && err == nil; n-- {
		b, err = f(b)
	}
	return b, err
}

func appendField(dst []byte, number protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(dst, number, protowire.BytesType), value)
}

func appendBytes(dst []byte, number protowire.Number, value []byte) (_, rest []byte, err error) {
	b, rest, err := msgp.ReadBytesZC(value)
	if err != nil {
		return dst, rest, err
	}
	return appendField(dst, number, b), rest, nil
}

func appendInt(dst []byte, number protowire.Number, value []byte) (_, rest []byte, err error) {
	i, rest, err := msgp.ReadInt64Bytes(value)
	return protowire.AppendVarint(protowire.AppendTag(dst, number, protowire.VarintType), uint64(i)), rest, err
}

func appendBool(dst []byte, number protowire.Number, value []byte) (_, rest []byte, err error) {
	b, rest, err := msgp.ReadBoolBytes(value)
	return protowire.AppendVarint(protowire.AppendTag(dst, number, protowire.VarintType), protowire.EncodeBool(b)), rest, err
}
