package sequence

// incarnation identifies one run of an engine by the identifiers in its messages: an epoch in the
// topic (SGLang), a publisher id in the batch (proposed for vLLM), both, or none.
type incarnation struct {
	epoch      string
	publisher  string
	epochKnown bool // reports whether a live batch was read; its epoch may be empty
}

// contradicts reports whether a batch is of another incarnation. An identifier that the batch lacks
// is not compared: replayed batches have no topic, and any batch may lack a publisher id.
func (i *incarnation) contradicts(b *Batch) bool {
	return !b.Replayed && i.epochKnown && string(b.Epoch) != i.epoch ||
		i.publisher != "" && len(b.Publisher) > 0 && string(b.Publisher) != i.publisher
}

// matches reports whether a live batch has an identifier, and all its identifiers are those of this incarnation.
func (i *incarnation) matches(b *Batch) bool {
	identified := len(b.Epoch) > 0 || len(b.Publisher) > 0
	return identified && !i.contradicts(b)
}

// confirms reports whether a batch has an identifier of this incarnation, and none of another.
func (i *incarnation) confirms(b *Batch) bool {
	same := i.publisher != "" && string(b.Publisher) == i.publisher ||
		!b.Replayed && i.epoch != "" && string(b.Epoch) == i.epoch
	return same && !i.contradicts(b)
}

// record adds the identifiers of a batch of this incarnation.
func (i *incarnation) record(b *Batch) {
	if !b.Replayed && !i.epochKnown {
		i.epoch, i.epochKnown = string(b.Epoch), true
	}
	if i.publisher == "" && len(b.Publisher) > 0 {
		i.publisher = string(b.Publisher)
	}
}
