// Package truth checks what MatchPrefix answers while engines, servers and connections fail: an answer that says EXACT of a tier
// must be what the engine holds at the answer's position, and one that says UPPER_BOUND must not be less.
//
// The changes of simulated engines, the entries that routers receive, and answers flow in. An error for each wrong answer flows
// out, and counts, from which a test sees whether it has checked anything.
//
// The check does not depend on time. The time of an entry's batch tells what the engine had cached after the last entry of a dp
// rank at the answer's position. An answer may show this state or a later one, up to the one before the rank's next entry, or up
// to the newest that the engine had when the answer came if no further entry is known. So it may lack batches in flight, and may
// not mix the states of two batches.
package truth
