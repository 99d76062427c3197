package checker_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

// passed returns the part of an entry that passes a filter; nil if the filter excludes the entry.
func passed(f *kvcastv1.Filter, e *kvcastv1.Entry) *kvcastv1.Entry {
	if len(f.GetWorkers()) > 0 && !slices.Contains(f.Workers, e.Worker) {
		return nil
	}
	if len(f.GetModels()) > 0 && !slices.Contains(f.Models, e.Model) {
		return nil
	}
	e = proto.CloneOf(e)
	e.Events = slices.DeleteFunc(e.Events, func(ev *kvcastv1.RouterEvent) bool {
		return len(f.GetTiers()) > 0 && ev.Tier != 0 && !slices.Contains(f.Tiers, ev.Tier)
	})
	if len(e.Events) == 0 {
		return nil
	}
	return e
}

func drawFilter(t *rapid.T) *kvcastv1.Filter {
	return &kvcastv1.Filter{
		Workers: rapid.SliceOfDistinct(rapid.SampledFrom([]string{"a", "b", "z"}), rapid.ID).Draw(t, "workers"),
		Models:  rapid.SliceOfDistinct(rapid.SampledFrom([]string{"m-a", "m-b", "z"}), rapid.ID).Draw(t, "models"),
		Tiers:   rapid.SliceOfDistinct(rapid.SampledFrom([]kvcastv1.Tier{device, disk}), rapid.ID).Draw(t, "tiers"),
	}
}

// filterStreams removes the content that a filter excludes, as a server does. A message without
// entries becomes progress, or is omitted.
func filterStreams(t *rapid.T, f *kvcastv1.Filter, streams []stream) []stream {
	out := make([]stream, 0, len(streams))
	head := uint64(0)
	for i, s := range streams {
		s.req.Filter = f
		if i > 0 {
			s.req.GetAfter().Seq = head
		}
		msgs := []*kvcastv1.SubscribeResponse{s.msgs[0]}
		msgs[0].Position.Seq = head
		for _, m := range s.msgs[1:] {
			var left []*kvcastv1.Entry
			for _, e := range m.Entries {
				if e = passed(f, e); e != nil {
					left = append(left, e)
				}
			}
			switch {
			case len(left) > 0:
				m.Entries = left
			case m.Progress == nil && rapid.Bool().Draw(t, "silent"):
				continue
			default:
				m.Entries, m.Progress = nil, &kvcastv1.Progress{}
			}
			m.PrevSeq, head = head, m.Position.Seq
			msgs = append(msgs, m)
		}
		out = append(out, stream{s.req, msgs})
	}
	return out
}

func TestRandomFilteredStreamsPass(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		entries := drawTiers(t, drawEntries(t))
		f := drawFilter(t)
		c, err := play(t, filterStreams(t, f, drawStreams(t, entries)))
		wantProperty(t, err, "")

		want := checker.NewView()
		for _, e := range entries {
			if e = passed(f, e); e != nil {
				want.Apply(e)
			}
		}
		if diff := cmp.Diff(want.Workers(), c.View().Workers()); diff != "" {
			t.Fatalf("workers (-want +got):\n%s", diff)
		}
		for _, w := range want.Workers() {
			for _, tier := range []kvcastv1.Tier{device, disk} {
				if diff := cmp.Diff(want.Blocks(w, 0, tier), c.View().Blocks(w, 0, tier)); diff != "" {
					t.Fatalf("blocks of %s in %v (-want +got):\n%s", w, tier, diff)
				}
			}
		}
	})
}
