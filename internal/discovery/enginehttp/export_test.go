package enginehttp

import "net/http"

// Timeout bounds a request and the first FindAsked.
const Timeout = timeout

// SleepInterval is the time until an engine that can be sent to sleep is asked again.
const SleepInterval = sleepInterval

// roundTrip is an http.RoundTripper.
type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// SetTransport makes a function answer the requests until reset is called.
func SetTransport(f func(*http.Request) (*http.Response, error)) (reset func()) {
	before := client.Transport
	client.Transport = roundTrip(f)
	return func() { client.Transport = before }
}
