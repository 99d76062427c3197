package ingest

import "sort"

// rememberedBatches is how many batches of a publisher are remembered, to tell
// one that comes a second time from one of an engine that began anew.
const rememberedBatches = 1024

// fingerprint tells batches apart that have the same seq.
type fingerprint struct {
	time uint64 // the bits of the batch's time; 0 where it has none
	hash uint64 // XXH3-64 of the payload
}

// remembered is 24 bytes, so that a publisher's memory is 24 KiB at most.
type remembered struct {
	seq uint64
	fingerprint
}

// fingerprints are those of the last batches, whose seqs grow. It is a ring
// that grows as it fills, since most of many publishers may be idle.
type fingerprints struct {
	ring []remembered
	next int // where the oldest is once the ring is full
}

// add remembers a batch in place of the oldest. Its seq is above all others'.
func (f *fingerprints) add(seq uint64, fp fingerprint) {
	if len(f.ring) < rememberedBatches {
		f.ring = append(f.ring, remembered{seq, fp})
		return
	}
	f.ring[f.next] = remembered{seq, fp}
	f.next = (f.next + 1) % rememberedBatches
}

// has tells whether the batch of this seq is remembered, with this fingerprint.
func (f *fingerprints) has(seq uint64, fp fingerprint) bool {
	i, ok := f.find(seq)
	return ok && f.ring[i] == remembered{seq, fp}
}

// knows tells whether a batch of this seq is remembered.
func (f *fingerprints) knows(seq uint64) bool {
	i, ok := f.find(seq)
	return ok && f.ring[i].seq == seq
}

// outlived tells whether a seq is from before all that are remembered.
func (f *fingerprints) outlived(seq uint64) bool {
	return len(f.ring) > 0 && seq < f.ring[f.next].seq
}

// find returns where a seq is, or the next one above it.
func (f *fingerprints) find(seq uint64) (int, bool) {
	n := len(f.ring)
	i := sort.Search(n, func(i int) bool { return f.ring[(f.next+i)%n].seq >= seq })
	if i == n {
		return 0, false
	}
	return (f.next + i) % n, true
}

// forget forgets all batches and keeps the memory.
func (f *fingerprints) forget() {
	f.ring = f.ring[:0]
	f.next = 0
}
