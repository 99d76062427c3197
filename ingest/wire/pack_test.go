package wire_test

import (
	"slices"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvcast/kvcast/ingest/wire"
)

// obj is a MessagePack map; arr would be []any.
type obj map[string]any

// raw is MessagePack as it stands.
type raw []byte

// pack encodes v. The keys of maps go in alphabetical order.
func pack(tb testing.TB, v any) []byte {
	tb.Helper()
	return appendValue(tb, nil, v)
}

func appendValue(tb testing.TB, b []byte, v any) []byte {
	tb.Helper()
	switch v := v.(type) {
	case raw:
		return append(b, v...)
	case []any:
		b = msgp.AppendArrayHeader(b, uint32(len(v)))
		for _, e := range v {
			b = appendValue(tb, b, e)
		}
		return b
	case obj:
		b = msgp.AppendMapHeader(b, uint32(len(v)))
		keys := make([]string, 0, len(v))
		for k := range v {
			keys = append(keys, k)
		}
		slices.Sort(keys)
		for _, k := range keys {
			b = msgp.AppendString(b, k)
			b = appendValue(tb, b, v[k])
		}
		return b
	default:
		b, err := msgp.AppendIntf(b, v)
		if err != nil {
			tb.Fatal(err)
		}
		return b
	}
}

// batchOf is an array batch of events.
func batchOf(events ...any) []any { return []any{1.5, events, 0} }

// decodeOf decodes a batch of events.
func decodeOf(tb testing.TB, events ...any) *wire.Batch {
	tb.Helper()
	var d wire.Decoder
	b, err := d.Decode(pack(tb, batchOf(events...)))
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// admit returns what new Rules leave of events, and what they count.
func admit(tb testing.TB, events ...any) ([]wire.Event, wire.Counts) {
	tb.Helper()
	var (
		size   wire.BlockSize
		counts wire.Counts
	)
	b := decodeOf(tb, events...)
	wire.NewRules(&size).Admit(b, 0, &counts)
	return b.Events, counts
}
