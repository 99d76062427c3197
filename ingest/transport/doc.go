// Package transport reads ZeroMQ sockets the way Go reads files: a goroutine waits
// for one on the runtime's own poller, so that a thousand sockets take no
// thousand threads and no common poll, and a deadline or another goroutine ends
// the wait.
//
// In flows a socket that github.com/pebbe/zmq4 made; out flow batches of whole
// messages, taken with one call to C, whose frames are views of libzmq's memory:
//
//	for {
//		if err := s.Wait(); err != nil {
//			return err // ErrInterrupted, os.ErrDeadlineExceeded, or what libzmq says
//		}
//		n, err := s.Receive(batch)
//		if err != nil {
//			return err
//		}
//		for i := range n {
//			use(batch.Message(i)) // good until the next Receive
//		}
//	}
//
// No wakeup is lost: Wait returns whenever there is a message. No message is
// split between two batches. Receive does not allocate.
package transport
