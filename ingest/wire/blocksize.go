package wire

// BlockSize is how many tokens the blocks of a worker have.
//
// vLLM also stores partial blocks: single blocks of a smaller size, that of its hash
// blocks, which divides the block size. They are no prefix that another request could
// be given, and their parents need not be stored. A size that was learned may be theirs.
type BlockSize struct {
	// Tokens is 0 while it is not known.
	Tokens uint32
	// Configured says that it did not come from a store, and stands.
	Configured bool
	// offDevice says that it was learned from a store of another tier: a connector's
	// blocks, such as LMCache's, may have a size of their own.
	offDevice bool
}

// Forget forgets a size that was learned.
func (s *BlockSize) Forget() {
	if !s.Configured {
		*s = BlockSize{}
	}
}

// fits reports whether a store's block size is the worker's, or is to become it.
func (r *Rules) fits(ev *Event, rank uint32) bool {
	size := r.blockSize
	switch {
	case ev.BlockSize == 0:
		return false
	case ev.BlockSize == size.Tokens:
		return true
	case size.Tokens == 0:
		return !ev.mayBePartial()
	case size.Configured || ev.Tier != TierDevice:
		return false
	default:
		return size.offDevice || ev.BlockSize > size.Tokens && ev.BlockSize%size.Tokens == 0 && r.knownMain(ev, rank)
	}
}

// mayBePartial reports whether a store looks like that of a partial block: one block
// with a parent, by an engine that names attention groups, as all do that have them.
// Were it a whole block, its parent would have been stored before.
func (ev *Event) mayBePartial() bool {
	return len(ev.BlockHashes) == 1 && ev.HasParent && ev.Parent != 0 && (ev.HasGroupIdx || ev.SpecKind != "")
}

// knownMain reports whether a store of main attention says so itself, or an earlier one
// of its group has said so.
func (r *Rules) knownMain(ev *Event, rank uint32) bool {
	return ev.SpecKind != "" || ev.HasGroupIdx && r.groups[group{rank, ev.GroupIdx}]
}

// settle makes an admitted store's block size the worker's.
func (r *Rules) settle(ev *Event) {
	if ev.BlockSize == r.blockSize.Tokens {
		r.blockSize.offDevice = r.blockSize.offDevice && ev.Tier != TierDevice
		return
	}
	ev.ReplacesBlockSize = r.blockSize.Tokens != 0
	*r.blockSize = BlockSize{Tokens: ev.BlockSize, offDevice: ev.Tier != TierDevice}
}

// ForeignHostBlockSize is the block size of a store in host memory that the last Admit
// skipped since it has another one than the worker; 0 where there was none.
func (r *Rules) ForeignHostBlockSize() uint32 { return r.foreignHost }
