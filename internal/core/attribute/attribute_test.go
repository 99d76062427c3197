package attribute_test

import (
	"maps"
	"slices"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/attribute"
)

// budget is a Budget with a limit; 0: none.
type budget struct{ limit, used int64 }

func (b *budget) Reserve(n int64) bool {
	if b.limit > 0 && n > b.limit-b.used {
		return false
	}
	b.used += n
	return true
}

func (b *budget) Release(n int64) { b.used -= n }

func (b *budget) Adjust(n int64) { b.used += n }

// TestInternerKeepsTheSetsInUse compares an interner with a list of uses.
func TestInternerKeepsTheSetsInUse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		bytes := &budget{limit: rapid.SampledFrom([]int64{0, 400}).Draw(t, "limit")}
		in := attribute.NewInterner(bytes)
		type use struct {
			slot uint32
			set  attribute.Set
		}
		var uses []use
		for range rapid.IntRange(1, 50).Draw(t, "steps") {
			switch i := rapid.IntRange(0, 2*len(uses)+3).Draw(t, "step"); {
			case i < len(uses):
				in.Release(uses[i].slot)
				uses = slices.Delete(uses, i, i+1)
			case i < 2*len(uses):
				in.Use(uses[i-len(uses)].slot, 1)
				uses = append(uses, uses[i-len(uses)])
			default:
				set := attribute.Set{
					LoRA:      rapid.SampledFrom([]string{"", "a", "adapter"}).Draw(t, "LoRA"),
					Salt:      rapid.SampledFrom([]string{"", "b"}).Draw(t, "salt"),
					BlockSize: rapid.SampledFrom([]uint32{0, 16}).Draw(t, "block size"),
				}
				if slot, ok := in.Acquire(set); ok {
					uses = append(uses, use{slot, set})
				} else if bytes.limit == 0 {
					t.Fatalf("%+v was refused by an unlimited budget", set)
				}
			}
			want := make(map[attribute.Set]uint32)
			for _, u := range uses {
				if slot, ok := want[u.set]; ok && slot != u.slot {
					t.Fatalf("%+v has slots %d and %d", u.set, slot, u.slot)
				}
				want[u.set] = u.slot
				if got := in.At(u.slot); got != u.set {
					t.Fatalf("slot %d: got %+v, want %+v", u.slot, got, u.set)
				}
			}
			got := make(map[attribute.Set]uint32)
			for _, set := range in.All() {
				got[set] = want[set]
			}
			if !maps.Equal(got, want) || in.Len() != len(want) || in.Slots() < len(want) {
				t.Fatalf("%d sets in %d slots (-want +got):\n%s", in.Len(), in.Slots(), cmp.Diff(want, got))
			}
			if bytes.limit > 0 && bytes.used > bytes.limit {
				t.Fatalf("budget: used %d of %d", bytes.used, bytes.limit)
			}
		}
		if rapid.Bool().Draw(t, "reset") {
			in.Reset()
		} else {
			for _, u := range uses {
				in.Release(u.slot)
			}
		}
		if in.Len() != 0 || bytes.used != 0 {
			t.Errorf("without uses: got %d sets, %d bytes, want none", in.Len(), bytes.used)
		}
	})
}

// TestInternerExceedsItsBudgetWithoutLimit adds and releases sets of a budget that has no memory left.
func TestInternerExceedsItsBudgetWithoutLimit(t *testing.T) {
	bytes := &budget{limit: 1}
	in := attribute.NewInterner(bytes)
	var slot uint32
	ok := false
	in.WithoutLimit(func() { slot, ok = in.Acquire(attribute.Set{LoRA: "adapter"}) })
	one := bytes.used
	if in.WithoutLimit(func() { in.ReserveSlots(3); in.ReserveSlots(2) }); in.Reserved() != 3 || bytes.used <= 2*one {
		t.Errorf("with the slots of 3 sets: got %d slots and %d bytes, want 3 slots and more than %d bytes", in.Reserved(), bytes.used, 2*one)
	}
	if !ok || bytes.used <= bytes.limit {
		t.Errorf("without limit: acquired %t, %d bytes used, want more than %d", ok, bytes.used, bytes.limit)
	}
	if _, ok := in.Acquire(attribute.Set{LoRA: "other"}); ok {
		t.Error("with the limit again: got a slot beyond it")
	}
	if in.WithoutLimit(func() { in.Release(slot) }); bytes.used != 0 {
		t.Errorf("after the last release: got %d bytes used, want 0", bytes.used)
	}
}

// TestInternerCopiesStrings overwrites the memory of a set's string after the call.
func TestInternerCopiesStrings(t *testing.T) {
	in, b := attribute.NewInterner(nil), []byte("adapter")
	slot, _ := in.Acquire(attribute.Set{LoRA: unsafe.String(&b[0], len(b))})
	copy(b, "!!!!!!!")
	if got := in.At(slot).LoRA; got != "adapter" {
		t.Errorf("got %q, want adapter", got)
	}
}
