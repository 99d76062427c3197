// Package ingest reads engines' KV-cache events from ZeroMQ.
//
// Endpoints flow in, to connect to or to bind. Each worker's decoded batches
// flow out to its Lane: in the engine's order, each once. What was lost on the
// way is reported as a Gap, an engine that began anew as a Restart, and a rank
// that was not heard of from its first batch on as incomplete.
//
// A few goroutines read many sockets each. All sockets of a worker are read by
// the same one, which decodes a message and calls the Lane before it receives
// the next. Nothing is queued in between: a Lane that blocks makes ZeroMQ buffer,
// up to its high-water mark, and beyond that the engine's end drops messages,
// which their numbers betray.
package ingest
