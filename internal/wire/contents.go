package wire

import (
	"encoding/binary"
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// AppendContents appends the extra keys of a store without tokens that Rules with ContentInKeys read: the tokens hash of each block, in 8 bytes, the
// highest first.
func AppendContents(dst []byte, tokensHashes []uint64) []byte {
	dst = msgp.AppendArrayHeader(dst, uint32(len(tokensHashes)))
	for _, hash := range tokensHashes {
		dst = msgp.AppendBytes(msgp.AppendArrayHeader(dst, 1), binary.BigEndian.AppendUint64(nil, hash))
	}
	return dst
}

// admitContents is admitStore for a store of AppendContents.
func (r *Rules) admitContents(ev *Event, rank uint32, counts *Counts) bool {
	hashes := r.hashes.reserve(len(ev.BlockHashes))[:0]
	p := ev.raw().ExtraKeys
	for i := range elements(p, 0) {
		for j := range elements(p, i) {
			if v, _ := readValue(p, j); v.class == classBin && len(v.bytes) == 8 && len(hashes) < len(ev.BlockHashes) {
				hashes = append(hashes, binary.BigEndian.Uint64(v.bytes))
			}
		}
	}
	switch {
	case len(hashes) != len(ev.BlockHashes), len(ev.LoRAName) > maxNameBytes:
		r.doubt(ReasonUnknownContent, ev.Tier, counts)
		return false
	case !r.fitsBlockSize(ev, rank):
		r.doubt(ReasonBlockSizeMismatch, ev.Tier, counts)
		r.ForeignBlockSize, r.ForeignTier = ev.BlockSize, ev.Tier
		return false
	case ev.HasParent && slices.Contains(ev.BlockHashes, ev.Parent) || r.repeatFinder.repeats(ev.BlockHashes):
		r.doubt(ReasonRepeatedHash, ev.Tier, counts)
		return false
	}
	r.learnBlockSize(ev, counts)
	ev.TokensHashes = r.hashes.allocate(len(hashes))
	return true
}
