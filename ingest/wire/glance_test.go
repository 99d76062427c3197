package wire_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"

	"github.com/kvcast/kvcast/ingest/wire"
)

// TestGlanceIsReadValue compares what is told at a glance to what readValue says,
// for every code, in payloads of any length.
func TestGlanceIsReadValue(t *testing.T) {
	for code := range 256 {
		for _, fill := range []byte{0, 1, 7, 0xff} {
			whole := bytes.Repeat([]byte{fill}, 44)
			for _, i := range []int{0, 1, 4} {
				whole[i] = byte(code)
				for n := i; n <= len(whole); n++ {
					checkGlance(t, whole[:n], i)
				}
				whole[i] = fill
			}
		}
	}
}

type glance struct{ class, n, at, fault int }

func checkGlance(t *testing.T, p []byte, i int) {
	t.Helper()
	var want, got glance
	want.class, want.n, want.at, want.fault = wire.Value(p, i)
	got.class, got.n, got.at, got.fault = wire.Nest(p, i)
	if want != got {
		t.Errorf("% x at %d: nest %+v, want %+v", p, i, got, want)
	}
	if s := wire.GlanceString(p, i); s != nil {
		if want.fault != 0 || want.class != wire.ClassStr || !bytes.Equal(s, p[want.at:want.at+want.n]) {
			t.Errorf("% x at %d: string %q, want %+v", p, i, s, want)
		}
	}
	if bits, ok := wire.Glance64(p, i, 0xcf); ok {
		if n, rest, err := msgp.ReadUint64Bytes(p[i:]); err != nil || n != bits || len(p)-len(rest) != i+9 {
			t.Errorf("% x at %d: number %d, want %d, error %v", p, i, bits, n, err)
		}
	}
}

// plainScan is ScanTokens without what makes it fast, up to the payload's end.
func plainScan(tokens []uint32, p []byte, i int) (k, end int) {
	for ; k < len(tokens) && i < len(p); k++ {
		if c := p[i]; c > 0x7f && c != 0xcc && c != 0xcd && c != 0xce {
			break
		}
		n, rest, err := msgp.ReadUint32Bytes(p[i:])
		if err != nil {
			break
		}
		tokens[k] = n
		i = len(p) - len(rest)
	}
	return k, i
}

// TestScanTokensIsPlain compares the loop over tokens to a plain one, on runs of one
// width, on mixed ones, and on those cut off or interrupted anywhere.
func TestScanTokensIsPlain(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 5))
	for range 20_000 {
		var p []byte
		wide, room := r.IntN(100), r.IntN(200)
		for k := range r.IntN(200) {
			switch {
			case k < wide:
				p = append(p, 0xce, byte(r.Uint32()), byte(r.Uint32()), byte(r.Uint32()), byte(r.Uint32()))
			case r.IntN(100) == 0:
				p = append(p, byte(r.Uint32()))
			default:
				p = msgp.AppendUint32(p, drawToken(r))
			}
		}
		p = p[:len(p)-r.IntN(len(p)/8+1)]
		i := r.IntN(min(len(p), 8) + 1)
		want, got := make([]uint32, room), make([]uint32, room)
		wantK, wantEnd := plainScan(want, p, i)
		gotK, gotEnd := wire.ScanTokens(got, p, i)
		// It may stop at any token that begins in the last seven bytes.
		stopped := gotK < wantK && gotEnd < wantEnd && gotEnd+8 > len(p)
		if !stopped && (gotK != wantK || gotEnd != wantEnd) || !cmp.Equal(want[:gotK], got[:gotK]) {
			t.Fatalf("% x at %d, room for %d: %d tokens up to %d, want %d up to %d", p, i, room, gotK, gotEnd, wantK, wantEnd)
		}
	}
}

// TestKeysInAnyOrder decodes map events whose keys come in ever other orders, with
// others among them that are nearly the same, using a decoder that expects the order
// of the event before and one that expects nothing.
func TestKeysInAnyOrder(t *testing.T) {
	fields := []struct {
		key   string
		value any
	}{
		{"type", "BlockStored"},
		{"block_hashes", []any{uint64(1) << 63}},
		{"parent_block_hash", 5},
		{"token_ids", []any{1, 1000}},
		{"block_size", 2},
		{"lora_id", nil},
		{"medium", "GPU"},
		{"lora_name", "adapter"},
		{"extra_keys", []any{nil}},
		{"group_idx", 3},
		{"kv_cache_spec_kind", "full_attention"},
		{"kv_cache_spec_sliding_window", 128},
		{"locality", "LOCAL"},
		{"session_id", "s"},
		{"cache_salt", "salt"},
		{"model_name", "m"},
		{"parent_block_hasi", 6},
		{"parent_block_has", 6},
		{"parent_block_hashes", 6},
		{"kv_cache_spec_kinf", "mamba"},
		{"kv_cache_spec_sliding_windox", 1},
		{"lora_namf", "other"},
		{"typf", "x"},
		{"mediun", "CPU"},
		{strings.Repeat("k", 40), 0},
	}
	r := rand.New(rand.NewPCG(6, 7))
	var known wire.Decoder
	for range 2000 {
		r.Shuffle(r.IntN(len(fields)+1), func(i, j int) { fields[i], fields[j] = fields[j], fields[i] })
		event := msgp.AppendMapHeader(nil, uint32(len(fields)))
		for _, f := range fields {
			event = msgp.AppendString(event, f.key)
			event = append(event, pack(t, f.value)...)
		}
		payload := pack(t, batchOf(raw(event), raw(event)))
		var fresh wire.Decoder
		for _, d := range []*wire.Decoder{&known, &fresh} {
			b, err := d.Decode(payload)
			if err != nil {
				t.Fatal(err)
			}
			const event = `{"kind":"stored","block_hashes":["9223372036854775808"],"parent":"5","token_ids":[1,1000],"block_size":2,` +
				`"medium":"GPU","lora_name":"adapter","extra_keys":[null],"group_idx":3,"spec_kind":"full_attention","sliding_window":128,` +
				`"locality":"LOCAL","session_id":"s","cache_salt":"salt","model_name":"m"}`
			want := parse(t, `{"ts":1.5,"dp_rank":0,"form":"array","events":[`+event+`,`+event+`]}`)
			if diff := cmp.Diff(want, parse(t, string(b.AppendJSON(nil)))); diff != "" {
				t.Fatalf("batch differs (-want +got):\n%s", diff)
			}
		}
	}
}

// TestKeysThatAreNoStrings decodes map events with other values in the place of
// keys, first of all with one that looks like what stands for no key.
func TestKeysThatAreNoStrings(t *testing.T) {
	for name, key := range map[string]string{
		"negative": "\xff", "nil": "\xc0", "false": "\xc2", "list": "\x92\xff\xff", "bytes": "\xc4\x02\xff\xff",
	} {
		pairs := strings.Repeat(key+"\xa1x", 12)
		b := decodeOf(t, raw("\x8d"+pairs+"\xa4type\xb0AllBlocksCleared"), raw("\x8d"+"\xa4type\xb0AllBlocksCleared"+strings.Repeat(key+"\xff", 12)))
		if len(b.Events) != 2 || len(b.Skipped) != 0 {
			t.Errorf("%s: batch is %s", name, b.AppendJSON(nil))
		}
	}
	var d wire.Decoder
	if _, err := d.Decode(pack(t, batchOf(raw("\x82"+strings.Repeat("\xc1", 40))))); !errors.Is(err, wire.ErrBadCode) {
		t.Errorf("error %v, want %v", err, wire.ErrBadCode)
	}
}
