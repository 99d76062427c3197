// Package server gives the stream to routers over gRPC.
//
// Requests flow in; the journal's entries flow out, encoded once and sent as
// they stand. Each subscriber is a cursor in the journal with nothing queued for
// it: it sees every entry once, in order, from where it asked to start, or is
// told why not; and a slow one costs nobody else anything.
package server
