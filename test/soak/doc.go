// Command soak runs kvcast under faults for a given time, and fails when a guarantee is violated.
//
// Simulated engines with all faults publish to a real server process. Subscribers with different
// behaviors follow it, each verified by the checker. Once a minute, and at the end, the engines
// pause: then the view of every subscriber, and of a new snapshot, must equal the blocks of each
// engine unless the rank is reported incomplete; the server's memory must have stayed flat, and its
// goroutines and descriptors must be back at their baseline. It prints a line per minute and a
// summary.
//
// It reads /proc and binds 127.0.0.2 and up, so it requires Linux.
package main
