// Package harness starts what tests of several packages need: kvcast in this process
// (Instance) or as a program of its own (Process), a TCP proxy that breaks connections
// (Proxy), and a reader of metrics (Metrics). Package enginetest has an engine.
//
// Nothing here needs cgo. Every wait ends after Timeout at the latest, which a machine
// a hundred times slower than usual meets.
package harness

import "time"

// Timeout bounds each wait for something that usually takes milliseconds.
const Timeout = 2 * time.Minute
