package feed

// CopyRule is how the stores and removes of a source are counted.
type CopyRule uint8

// The rules. What an event itself states has precedence; see wire.Event.Origin and
// wire.Rare.RemainingCopies.
const (
	// CopyRuleCounted: a store adds a copy, a remove removes one.
	CopyRuleCounted CopyRule = iota
	// CopyRuleDetected: a store without a parent, of a block that the device tier has, may
	// be an announcement. Package pipeline decides which it is.
	CopyRuleDetected
	// CopyRuleAnnouncedLast: a store of a block that exists adds no copy, a remove removes
	// all copies.
	CopyRuleAnnouncedLast
)
