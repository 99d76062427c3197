// Package harness starts what tests of several packages need: kvcast in this process (Instance) or
// as a separate program (Process), a TCP proxy that breaks connections (Proxy), a reader of metrics
// (Metrics), and a log (Log). WaitFor polls a condition; ForEachTransport runs a test with each
// implementation of ZeroMQ. Package enginetest has an engine.
//
// Nothing here needs cgo. Every wait ends after Timeout at the latest, which is ample on a machine
// a hundred times slower than usual.
package harness

import "time"

// Timeout bounds each wait for something that usually takes milliseconds.
const Timeout = 2 * time.Minute
