// Command soak runs kvcast under faults for a given time, and fails when a guarantee is violated.
//
// Simulated engines with all faults publish to a real server process. Subscribers with different
// behaviors follow it, each verified by the checker. Once a minute, and at the end, the engines
// pause. The view of every subscriber and of a new snapshot must then equal the blocks of each
// engine, unless the rank is reported incomplete. All the time, prompts are matched: an answer that says EXACT must be
// what the engine held, as package truth defines it, and many answers must say so. The server's memory must not grow, and its
// goroutines and descriptors must return to their baseline. The command prints a line per minute
// and a summary.
//
// It reads /proc and binds 127.0.0.2 and up, so it requires Linux.
package main
