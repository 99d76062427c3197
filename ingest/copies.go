package ingest

// Copies says what a further store of a block means that the engine holds already: an
// engine may hold one block hash in several physical blocks, or only announce again
// what a request reuses.
type Copies string

// The settings of Copies.
const (
	// CopiesAuto tells copies from announcements for EngineVLLM, whose requests can ask
	// for announcements, and counts every store of the other engines as a copy: none
	// of them announces.
	CopiesAuto Copies = "auto"
	// CopiesCounted counts every store as one more copy.
	CopiesCounted Copies = "counted"
	// CopiesAnnouncedLast is for an engine that sends a remove for the last copy only.
	CopiesAnnouncedLast Copies = "announced-last"
)

const allowedCopies = "auto, counted or announced-last"

func (c Copies) known() bool {
	switch c {
	case CopiesAuto, CopiesCounted, CopiesAnnouncedLast:
		return true
	default:
		return false
	}
}

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

// rule decides for an engine.
func (c Copies) rule(e Engine) CopyRule {
	switch {
	case c == CopiesAnnouncedLast:
		return CopyRuleAnnouncedLast
	case c != CopiesCounted && e == EngineVLLM:
		return CopyRuleDetected
	default:
		return CopyRuleCounted
	}
}
