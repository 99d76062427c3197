// Package restart kills kvcast serve with a durable journal at random points, restarts it, and checks that nothing is lost:
// a router that resumes gets each entry once, in one epoch, and the state equals that of a server that was never killed.
package restart
