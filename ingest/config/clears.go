package config

import (
	"slices"

	"github.com/kvcast/kvcast/internal/feed"
)

// Clears is what an engine clears when its event names no tier.
type Clears string

// The settings of Clears.
const (
	// ClearsAuto is ClearsDevice for feed.EngineVLLM, whose event is of the pool in device memory alone: the blocks that a
	// connector has offloaded stay. For other engines it means ClearsAll.
	ClearsAuto   Clears = "auto"
	ClearsDevice Clears = "device"
	ClearsAll    Clears = "all"
)

const allowedClears = "auto, device or all"

func (c Clears) known() bool {
	return slices.Contains([]Clears{ClearsAuto, ClearsDevice, ClearsAll}, c)
}

// Device reports whether an engine's clears are of device memory.
func (c Clears) Device(e feed.Engine) bool {
	return c == ClearsDevice || c != ClearsAll && e == feed.EngineVLLM
}
