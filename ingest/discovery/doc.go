// Package discovery finds workers while the program runs.
//
// What names them flows in: a DNS name with an address for each engine, or a list
// that somebody keeps in a file. Workers to add and to remove flow out to an
// ingest.Ingest. A look that fails changes nothing, so that a broken name server or
// a half-written file costs no worker; one that is no longer found is removed, after
// a grace time where its absence may be a passing one.
package discovery
