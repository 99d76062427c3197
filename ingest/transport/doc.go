// Package transport has the ZeroMQ sockets of package ingest. It is the only package of the
// module that uses cgo.
//
// Into it flow endpoints: a Context connects or binds SUB sockets, and Requests send
// requests to replay sockets. Out of it flow messages, in the order in which they arrived:
// an Inbox drains a socket into a bounded buffer, and a Monitor has the events of its
// connections.
//
// A Socket is used as Go uses files. A goroutine waits for it on the runtime's poller, so
// that a thousand sockets need neither a thousand threads nor a common poll, and a deadline
// or another goroutine ends the wait:
//
//	for {
//		if err := s.Wait(); err != nil {
//			return err // ErrInterrupted, os.ErrDeadlineExceeded, or libzmq's error
//		}
//		n, err := s.Receive(batch)
//		if err != nil {
//			return err
//		}
//		for i := range n {
//			use(batch.Message(i)) // valid until the next Receive
//		}
//	}
//
// Receive takes a batch of whole messages with one call to C, without allocating; their
// frames are views of libzmq's memory. No wakeup is lost: Wait returns whenever there is a
// message.
package transport
