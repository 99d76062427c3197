package match_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/match"
)

// checkDecode decodes an encoded request with Decode and with the generated code, and compares the queries.
func checkDecode(t interface {
	Helper()
	Errorf(string, ...any)
	Fatalf(string, ...any)
}, q *match.Query, b []byte) {
	t.Helper()
	id, err := q.Decode(b)
	generated := new(kvcastv1.MatchPrefixesRequest)
	if wantErr := proto.Unmarshal(b, generated); err != nil || wantErr != nil {
		if (err == nil) != (wantErr == nil) {
			t.Errorf("%x: got error %v, the generated code %v", b, err, wantErr)
		}
		return
	}
	var want match.Query
	want.Set(generated.GetRequest())
	if id != generated.GetId() {
		t.Errorf("got id %d, want %d", id, generated.GetId())
	}
	outcomes := generated.GetOutcomes()[:min(len(generated.GetOutcomes()), match.MaxOutcomes+1)]
	if diff := cmp.Diff(outcomes, q.Outcomes, protocmp.Transform(), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("%x: outcomes (-want +got):\n%s", b, diff)
	}
	routed := generated.GetRouted()[:min(len(generated.GetRouted()), match.MaxRouted+1)]
	if diff := cmp.Diff(routed, q.Routed, protocmp.Transform(), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("%x: routed (-want +got):\n%s", b, diff)
	}
	if asks := generated.GetRequest() != nil || len(outcomes)+len(routed) == 0; asks != q.Asks() {
		t.Errorf("%x: got %v", b, q.Asks())
	}
	opts := cmp.Options{cmpopts.EquateEmpty(), cmpopts.IgnoreFields(index.Query{}, "Worker")}
	if diff := cmp.Diff(want.Query, q.Query, opts); diff != "" {
		t.Errorf("%x: query (-want +got):\n%s", b, diff)
	}
	// An unknown field of a position has no effect.
	if diff := cmp.Diff(want.After, q.After, protocmp.Transform(), protocmp.IgnoreUnknown()); diff != "" {
		t.Errorf("%x: position (-want +got):\n%s", b, diff)
	}
	bytes := want.Bytes + 256*int64(len(outcomes)) + match.RoutedBytes(routed)
	if want.MaxWait() != q.MaxWait() || bytes != q.Bytes {
		t.Errorf("%x: got a wait of %v and %d bytes, want %v and %d", b, q.MaxWait(), q.Bytes, want.MaxWait(), bytes)
	}
	for _, name := range append(generated.GetRequest().GetWorkers(), "absent") {
		if want.Worker != nil && q.Worker(name) != want.Worker(name) {
			t.Errorf("worker %q: got %v", name, q.Worker(name))
		}
	}
}

func TestDecodeEqualsGeneratedCode(t *testing.T) {
	var q match.Query
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.SampledFrom([]string{"", "m", "another", "\xff"})
		number := rapid.OneOf(rapid.Uint64Range(0, 300), rapid.Uint64())
		hashes := rapid.SliceOfN(number, 0, 5)
		prompt := rapid.Custom(func(t *rapid.T) *kvcastv1.Prompt {
			return &kvcastv1.Prompt{
				TokenIds:     rapid.SliceOfN(rapid.OneOf(rapid.Uint32Range(0, 300), rapid.Uint32Range(0, 1<<22), rapid.Uint32()), 0, 5).Draw(t, "tokens"),
				TokensHashes: hashes.Draw(t, "tokens hashes"), BlockHashes: hashes.Draw(t, "block hashes"),
				LoraName: text.Draw(t, "lora"), CacheSalt: text.Draw(t, "salt"),
				Eagle: rapid.Bool().Draw(t, "eagle"), BlockSize: rapid.Uint32().Draw(t, "block size"),
			}
		})
		req := &kvcastv1.MatchPrefixRequest{
			Model: text.Draw(t, "model"), Prompts: rapid.SliceOfN(prompt, 0, 3).Draw(t, "prompts"),
			Workers: rapid.SliceOfN(text, 0, 3).Draw(t, "workers"), Limit: rapid.Uint32().Draw(t, "limit"),
			MaxWaitNano: uint64(rapid.Int64Min(0).Draw(t, "wait")), MaxBlockHashes: rapid.SampledFrom([]uint32{0, 1, 1 << 31}).Draw(t, "hashes"),
		}
		if rapid.Bool().Draw(t, "position") {
			req.After = &kvcastv1.Position{Epoch: text.Draw(t, "epoch"), Seq: number.Draw(t, "seq")}
		}
		// Marshal rejects invalid UTF-8, which a client can send.
		b, err := proto.Marshal(&kvcastv1.MatchPrefixesRequest{Id: number.Draw(t, "id"), Request: req})
		if err != nil {
			return
		}
		for range rapid.IntRange(0, 2).Draw(t, "changes") {
			if len(b) > 0 {
				b[rapid.IntRange(0, len(b)-1).Draw(t, "at")] = rapid.Byte().Draw(t, "byte")
			}
		}
		checkDecode(t, &q, b[:rapid.IntRange(len(b)/2, len(b)).Draw(t, "length")])
	})
}

// A prompt takes many times the memory of its encoding, so that few of too many may be kept.
func TestFewOfTooManyPromptsAreKept(t *testing.T) {
	testclass.WithoutRace(t)
	const allowed = 64
	for _, n := range []int{allowed, allowed + 1, allowed + 2, 500_000} {
		request := &kvcastv1.MatchPrefixRequest{Model: "m", Prompts: make([]*kvcastv1.Prompt, n)}
		for i := range request.GetPrompts() {
			request.Prompts[i] = new(kvcastv1.Prompt)
		}
		request.Prompts[n-1].TokenIds = []uint32{1}
		b, err := proto.Marshal(&kvcastv1.MatchPrefixesRequest{Request: request})
		if err != nil {
			t.Fatal(err)
		}
		var q match.Query
		checkDecode(t, &q, b)
		want := min(n, allowed+1)
		if len(q.Prompts) != want || q.Check() == nil {
			t.Errorf("%d prompts: Decode keeps %d, want %d, and no field is invalid: %t", n, len(q.Prompts), want, q.Check() == nil)
		}
		if b, err = proto.Marshal(request); err != nil {
			t.Fatal(err)
		}
		short := new(kvcastv1.MatchPrefixRequest)
		if err := proto.Unmarshal(match.LimitPrompts(b), short); err != nil || len(short.GetPrompts()) != want {
			t.Errorf("%d prompts: LimitPrompts keeps %d, error %v; want %d", n, len(short.GetPrompts()), err, want)
		}
	}
	for _, b := range [][]byte{nil, {0xff}, {0x12, 5, 1}} {
		if got := match.LimitPrompts(b); string(got) != string(b) {
			t.Errorf("%x: got %x", b, got)
		}
	}
}

// TestFewOfTooManyOutcomesAreKept decodes more outcomes than are allowed.
func TestFewOfTooManyOutcomesAreKept(t *testing.T) {
	for _, n := range []int{match.MaxOutcomes, match.MaxOutcomes + 1, 100_000} {
		b, err := proto.Marshal(&kvcastv1.MatchPrefixesRequest{Outcomes: slices.Repeat([]*kvcastv1.Outcome{{}}, n)})
		if err != nil {
			t.Fatal(err)
		}
		var q match.Query
		checkDecode(t, &q, b)
		if b, err = proto.Marshal(&kvcastv1.ReportOutcomeRequest{Outcomes: slices.Repeat([]*kvcastv1.Outcome{{}}, n)}); err != nil {
			t.Fatal(err)
		}
		short := new(kvcastv1.ReportOutcomeRequest)
		err = proto.Unmarshal(match.LimitOutcomes(b), short)
		if want := min(n, match.MaxOutcomes+1); err != nil || len(short.GetOutcomes()) != want || len(q.Outcomes) != want {
			t.Errorf("%d outcomes: kept %d and %d, error %v; want %d", n, len(short.GetOutcomes()), len(q.Outcomes), err, want)
		}
	}
}

// TestFewOfTooManyRoutedPromptsAreKept decodes more routed prompts than are allowed.
func TestFewOfTooManyRoutedPromptsAreKept(t *testing.T) {
	for _, n := range []int{match.MaxRouted, match.MaxRouted + 1, 100_000} {
		all := slices.Repeat([]*kvcastv1.RoutedPrompt{{}}, n)
		b, err := proto.Marshal(&kvcastv1.MatchPrefixesRequest{Routed: all})
		if err != nil {
			t.Fatal(err)
		}
		var q match.Query
		checkDecode(t, &q, b)
		if b, err = proto.Marshal(&kvcastv1.NoteRoutedRequest{Routed: all}); err != nil {
			t.Fatal(err)
		}
		short := new(kvcastv1.NoteRoutedRequest)
		err = proto.Unmarshal(match.LimitRouted(b), short)
		if want := min(n, match.MaxRouted+1); err != nil || len(short.GetRouted()) != want || len(q.Routed) != want {
			t.Errorf("%d routed prompts: kept %d and %d, error %v; want %d", n, len(short.GetRouted()), len(q.Routed), err, want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	b, err := proto.Marshal(&kvcastv1.MatchPrefixesRequest{Id: 1, Request: &kvcastv1.MatchPrefixRequest{
		Model: "m", Prompts: []*kvcastv1.Prompt{{TokenIds: []uint32{1, 300, 70_000, 1 << 31}}, {TokensHashes: []uint64{1}, LoraName: "l"}},
		Workers: []string{"w"}, Limit: 1, After: &kvcastv1.Position{Epoch: "e", Seq: 1}, MaxWaitNano: 1,
	}, Outcomes: []*kvcastv1.Outcome{{Worker: "w", DpRank: 1, Position: &kvcastv1.Position{Epoch: "e", Seq: 1}, PredictedTokens: 2, CachedTokens: 3, Trust: 1}},
		Routed: []*kvcastv1.RoutedPrompt{{Worker: "w", DpRank: 1, Prompt: &kvcastv1.Prompt{TokensHashes: []uint64{1}}, TtlNano: 1}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte{0x12, 4, 0x12, 2, 0x08, 5})                            // a token id that is not packed
	f.Add([]byte{0x85, 0xa6, 0xa6, 0xf1, 0x30, 0x30, 0x30, 0x30, 0x30}) // a field number that is too large
	f.Fuzz(func(t *testing.T, b []byte) { checkDecode(t, new(match.Query), b) })
}
