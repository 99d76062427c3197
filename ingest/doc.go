// Package ingest reads engines' KV-cache events from ZeroMQ.
//
// Endpoints flow in, to connect to or to bind, now or later. Each worker's decoded
// batches flow out to its Lane: in the engine's order, each once. What was lost on
// the way is fetched from the engine's replay socket; what can not be had is
// reported as a Gap, an engine that began anew as a Restart, and a rank that was
// not heard of from its first batch on as incomplete. A worker that is gone for the
// grace time is removed; one that is merely silent never is.
//
// Each socket has a goroutine, which waits for it on Go's poller, takes some
// messages at once, and calls the worker's Lane for each before it takes more.
// Nothing is queued in between: a Lane that blocks makes ZeroMQ buffer, up to its
// high-water mark, and beyond that the engine's end drops messages, which their
// numbers betray, and which are fetched once the Lane goes on. Only while batches
// are being fetched are those behind them held back, in bounded memory.
//
// A program that wants the events of one engine, and nothing else of kvcast, uses a
// Client: NewClient, Connect, and Close when it is done. Its handler may be set before
// or after it connects, and changed while it runs; what it reads and how long the
// handler takes is in Client.Stats, and in Prometheus metrics that are registered for
// as long as the Client runs.
package ingest
