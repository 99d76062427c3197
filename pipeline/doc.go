// Package pipeline turns engines' batches into the events that routers apply.
//
// Each worker's decoded batches flow in, in order; the same worker's
// RouterEvents flow out to the journal, one entry for each batch. In between,
// what several sources of a worker hold is told once, adjacent events are merged,
// and removes of blocks that the engine still holds in another copy are held back.
// Everything of a worker keeps its order, event ids have no holes, and the block
// table is at any time what a router holds that has applied the entries so far.
package pipeline
