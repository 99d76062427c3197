package feed

// CopyRule is how the pipeline counts the copies of a source's blocks.
type CopyRule uint8

// The copy rules. The fields wire.Event.Origin and wire.Rare.RemainingCopies of an event take precedence.
const (
	// CopyRuleCounted: a store adds a copy, a remove removes one.
	CopyRuleCounted CopyRule = iota
	// CopyRuleDetected: as CopyRuleCounted, but a store without a parent of a block that is in the device tier
	// may instead announce that a request reuses the block. Package pipeline decides by the engine's events.
	CopyRuleDetected
	// CopyRuleAnnouncedLast: a store of an existing block adds no copy, and a remove removes all copies.
	CopyRuleAnnouncedLast
)
