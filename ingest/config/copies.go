package config

import "github.com/kvcast/kvcast/feed"

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

// Rule decides for an engine.
func (c Copies) Rule(e feed.Engine) feed.CopyRule {
	switch {
	case c == CopiesAnnouncedLast:
		return feed.CopyRuleAnnouncedLast
	case c != CopiesCounted && e == feed.EngineVLLM:
		return feed.CopyRuleDetected
	default:
		return feed.CopyRuleCounted
	}
}
