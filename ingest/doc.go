// Package ingest reads engines' KV-cache events from ZeroMQ.
//
// Endpoints flow in, to connect to or to bind, now or later. Each worker's decoded
// batches flow out to its Lane: in the engine's order, each once. What was lost on
// the way is fetched from the engine's replay socket; what cannot be fetched is
// reported as a Gap, also where a rank joined late, and an engine that restarted as a
// Restart. A worker that is gone for the grace time is removed; one that is merely
// silent never is.
//
// Each socket has two goroutines. One drains it into a bounded buffer, whatever comes:
// libzmq must never stop at a high-water mark. The other takes some messages at once
// and calls the worker's Lane for each. While a Lane blocks the buffer fills; messages
// that do not fit are dropped, and fetched once the Lane goes on. While batches are
// being fetched those behind them wait in a reorder buffer, which is bounded as well.
//
// What peers create (sources, ranks, buffers, what is said of workers) is bounded over
// the whole process; see Config. Over a bound the newcomer is refused.
//
// A program that wants the events of one engine, and nothing else of kvcast, uses a
// Client: NewClient, Connect, and Close when it is done. Its handler may be set before
// or after it connects, and changed while it runs; what it reads and how long the
// handler takes is in Client.Stats, and in Prometheus metrics that are registered for
// as long as the Client runs.
package ingest
