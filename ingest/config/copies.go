package config

import "github.com/kvcast/kvcast/feed"

// Copies is what a store of a block means that the engine holds already: one more physical
// copy, or an announcement that a request reuses the block.
type Copies string

// The settings of Copies.
const (
	// CopiesAuto distinguishes copies from announcements for feed.EngineVLLM, whose requests
	// can ask for announcements. For other engines, which never announce, it is
	// CopiesCounted.
	CopiesAuto Copies = "auto"
	// CopiesCounted counts every store as a copy.
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

// Rule returns the rule for an engine.
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
