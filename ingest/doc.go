// Package ingest reads engines' KV-cache events from ZeroMQ.
//
// Endpoints flow in, each worker's decoded batches flow out to its Lane: in the
// engine's order, each once. What was lost on the way is reported as a Gap, an
// engine that began anew as a Restart.
package ingest
