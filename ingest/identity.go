package ingest

// identity is what an engine says of its incarnation beside its seqs: an epoch in the
// topic (SGLang), a publisher id in the batch (proposed for vLLM), both or neither. A
// batch with another one than the incarnation's is of another incarnation.
type identity struct {
	epoch     string
	publisher string // the 16 bytes
	// epochKnown reports whether a live batch has been seen: an empty epoch counts.
	epochKnown bool
}

// contradicts reports whether a batch is of another incarnation. Replayed batches have
// no topic, and any batch may lack a publisher id: what a batch lacks contradicts
// nothing.
func (id *identity) contradicts(a *arrival) bool {
	return !a.replayed && id.epochKnown && string(a.epoch) != id.epoch ||
		id.publisher != "" && len(a.publisher) > 0 && string(a.publisher) != id.publisher
}

// matches reports whether a live batch says that it is of this incarnation, and not
// merely that nothing contradicts it.
func (id *identity) matches(a *arrival) bool {
	said := len(a.epoch) > 0 || len(a.publisher) > 0
	return said && !id.contradicts(a)
}

// learn fills in what was not known of the incarnation.
func (id *identity) learn(a *arrival) {
	if !a.replayed && !id.epochKnown {
		id.epoch, id.epochKnown = string(a.epoch), true
	}
	if id.publisher == "" && len(a.publisher) > 0 {
		id.publisher = string(a.publisher)
	}
}
