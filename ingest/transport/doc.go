// Package transport has the ZeroMQ sockets of package ingest. It is the only package of the
// module that uses cgo.
//
// In: endpoints. A Context connects or binds SUB sockets, and Requests send requests to
// replay sockets. Out: messages, in the order in which they arrived. An Inbox drains a
// socket into a bounded buffer, and a Monitor has the events of its connections.
//
// A goroutine waits for a Socket on the runtime's poller, as it waits for a file: a thousand
// sockets need neither a thousand threads nor a common poll. Another goroutine can interrupt
// the wait:
//
//	for {
//		if err := s.Wait(); err != nil {
//			return err // ErrInterrupted or libzmq's error
//		}
//		batch.Release()
//		if err := s.Receive(batch); err != nil {
//			return err
//		}
//		for i := range batch.Len() {
//			use(batch.Message(i)) // valid until the next Release
//		}
//	}
//
// Receive takes many messages with one call to C, without allocating: their frames are views
// of libzmq's memory. No wakeup is lost: Wait returns whenever there is a message.
//
// context.go, socket.go, receive.go and monitor.go depend on libzmq, the other files do not.
package transport
