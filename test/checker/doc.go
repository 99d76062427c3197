// Package checker is the judge of every test that has a stream in it.
//
// What a subscriber asked for and what it received flow in, message by message
// and over any number of resumed streams; the first broken promise flows out, as
// a Violation that names the Property. Beside it stands View, the state that the
// stream amounts to, to be compared with what the engines hold.
//
// It is an oracle: it follows the comments of the contract, keeps plain maps, and
// shares no code with the server that it judges. A Checker judges the streams of
// Subscribe, Replay and Snapshot, from any start, and with snapshots at any place.
package checker
