package config

import (
	"slices"

	"github.com/kvcast/kvcast/internal/feed"
)

// Copies is the meaning of a store of a block that the engine has already: another physical copy, or an
// announcement that a request reuses the block.
type Copies string

// The settings of Copies.
const (
	// CopiesAuto distinguishes copies from announcements for feed.EngineVLLM, which announces on
	// request. For other engines, which never announce, it means CopiesCounted.
	CopiesAuto Copies = "auto"
	// CopiesCounted counts every store as a copy.
	CopiesCounted Copies = "counted"
	// CopiesAnnouncedLast is for an engine that sends a remove only for the last copy.
	CopiesAnnouncedLast Copies = "announced-last"
)

const allowedCopies = "auto, counted or announced-last"

func (c Copies) known() bool {
	return slices.Contains([]Copies{CopiesAuto, CopiesCounted, CopiesAnnouncedLast}, c)
}

// Rule returns the rule that counts the copies of an engine.
func (c Copies) Rule(e feed.Engine) feed.CopyRule {
	switch {
	case c == CopiesAnnouncedLast, c != CopiesCounted && e == feed.EngineLMCache: // the parts of a chunk are stored one by one
		return feed.CopyRuleAnnouncedLast
	case c != CopiesCounted && e == feed.EngineVLLM:
		return feed.CopyRuleDetected
	default:
		return feed.CopyRuleCounted
	}
}
