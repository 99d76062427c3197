package sequence

// incarnation identifies one run of an engine by what its messages carry besides seqs: an
// epoch in the topic (SGLang), a publisher id in the batch (proposed for vLLM), both, or
// neither.
type incarnation struct {
	epoch      string
	publisher  string
	epochKnown bool // reports whether a live batch was read: an empty epoch counts
}

// contradicts reports whether a batch is of another incarnation. Replayed batches have
// no topic, and any batch may lack a publisher id: what a batch lacks contradicts
// nothing.
func (i *incarnation) contradicts(b *Batch) bool {
	return !b.Replayed && i.epochKnown && string(b.Epoch) != i.epoch ||
		i.publisher != "" && len(b.Publisher) > 0 && string(b.Publisher) != i.publisher
}

// matches reports whether a live batch names this incarnation, rather than merely not
// contradicting it.
func (i *incarnation) matches(b *Batch) bool {
	named := len(b.Epoch) > 0 || len(b.Publisher) > 0
	return named && !i.contradicts(b)
}

// learn adds what a batch of this incarnation says of it.
func (i *incarnation) learn(b *Batch) {
	if !b.Replayed && !i.epochKnown {
		i.epoch, i.epochKnown = string(b.Epoch), true
	}
	if i.publisher == "" && len(b.Publisher) > 0 {
		i.publisher = string(b.Publisher)
	}
}
