// Command soak runs a kvcast under faults for as long as it is told, and fails when
// a promise is broken.
//
// Simulated engines under all faults there are publish to a real server process, and
// subscribers of several tempers follow it, each judged by the checker. Once a minute,
// and at the end, the engines stand still: then the view of every subscriber, and of a
// new snapshot, must be what each engine holds, or have told that it may be another;
// and the server's memory must have stayed flat, and its goroutines and descriptors
// must be back where they were. Out comes a line a minute and a summary.
//
// It reads /proc and binds 127.0.0.2 and up, so it is for Linux.
package main
