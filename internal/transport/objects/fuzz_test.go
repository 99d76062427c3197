package objects

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/kvcast/kvcast/internal/budget"
)

// FuzzDirectoryPage reads pages of LMCache's coordinator, and adds what they have to a list.
func FuzzDirectoryPage(f *testing.F) {
	for _, text := range []string{
		`{"total":1,"keys":[{"key":{"chunk_hash_hex":"0000000000000001","model_name":"m","kv_rank":0},"placements":[{"shared":true}],"num_tokens":1}]}`,
		`{"keys":[{},{},{}]}`, `{"keys":null}`, `{"keys":[{"key":{"kv_rank":-1,"object_group_id":4294967296}}]}`, `{"total":"1"}`, `[]`, `{"x":[[[[[[]]]]]],"keys":[`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		const limit = 2
		p, err := readPage(json.NewDecoder(bytes.NewReader(text)), limit)
		if err != nil {
			return
		}
		if len(p.objects) > limit {
			t.Fatalf("%d objects, want at most %d", len(p.objects), limit)
		}
		r := &receiver{Config: Config{Server: LMCache, Model: "m"}, blocks: newBlocks("", "m", budget.New("test", 0))}
		r.blocks.begin()
		lmcache{}.objects(r, p)
		if n := r.blocks.list.objects; n != len(p.objects) {
			t.Fatalf("%d of %d objects count", n, len(p.objects))
		}
	})
}
