package feed

// CopyRule is how a source's stores and removes are counted: Copies, decided for its
// engine.
type CopyRule uint8

// The rules. An event that says itself what it means outweighs each of them; see
// wire.Event.Origin and wire.Rare.RemainingCopies.
const (
	// CopyRuleCounted: a store adds a copy, a remove takes one away.
	CopyRuleCounted CopyRule = iota
	// CopyRuleDetected: a store on the device from the root, of a block that is held,
	// may be an announcement. Package pipeline says how that is decided.
	CopyRuleDetected
	// CopyRuleAnnouncedLast: a store adds nothing to a block that is held, a remove
	// takes away all copies.
	CopyRuleAnnouncedLast
)
