// Package hostile attacks kvcast serve as those do who reach its ports: engines, routers, consumers, servers that it calls, and clients of the admin port. Honest
// peers beside them must be served, and memory and logs stay bounded.
package hostile
