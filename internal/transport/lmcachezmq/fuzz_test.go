package lmcachezmq

import (
	"testing"

	"github.com/tinylib/msgp/msgp"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	lmcachev1 "github.com/kvcast/kvcast/internal/peer/lmcache/v1"
)

// FuzzAppendBatch converts what a server may send. A result without an error is one that readers of protobuf read, unless a text is not UTF-8, and is not longer.
func FuzzAppendBatch(f *testing.F) {
	record := map[string]any{"seq": 6, "kind": "stored", "block_hashes": []any{[]byte("h1")}, "parent_block_hash": nil, "token_ids": []any{1, 70000}}
	seed, err := msgp.AppendIntf(nil, map[string]any{"enabled": true, "incarnation": 7, "next_cursor": 6, "lost": false, "events": []any{record}, "x": []any{1}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add([]byte{0xdf, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, result []byte) {
		batch, err := appendBatch(nil, result)
		if err != nil {
			return
		}
		if len(batch) > len(result) {
			t.Errorf("%d bytes became %d", len(result), len(batch))
		}
		for b := batch; len(b) > 0; {
			_, _, n := protowire.ConsumeField(b)
			if n < 0 {
				t.Fatal(protowire.ParseError(n))
			}
			b = b[n:]
		}
		var m lmcachev1.KVEventBatch
		if err := proto.Unmarshal(batch, &m); err == nil && len(m.GetEvents()) > len(result) {
			t.Errorf("%d events of %d bytes", len(m.GetEvents()), len(result))
		}
	})
}
