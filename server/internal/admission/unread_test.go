package admission

import (
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/peer"

	"github.com/kvcast/kvcast/server/internal/callerror"
)

// unreadConn is a connection that is closed when its client does not read.
type unreadConn struct {
	net.Conn
	closed chan struct{}
	once   *sync.Once
}

func (c unreadConn) Close() error { c.once.Do(func() { close(c.closed) }); return nil }

func (unreadConn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1)} }

// newUnread returns limits, and a connection with its context.
func newUnread(t *testing.T) (*Unread, *connection, unreadConn) {
	t.Helper()
	u := NewUnread(time.Minute, func(net.Addr) {})
	all := NewConnections(NewQuota(promauto.With(nil), "connections", 10, 10), u, false, nil)
	tcp := unreadConn{closed: make(chan struct{}), once: new(sync.Once)}
	c, err := all.add(tcp)
	if err != nil {
		t.Fatal(err)
	}
	return u, c, tcp
}

func answer(t *testing.T, u *Unread, c *connection, size int) (mem.BufferSlice, error) {
	t.Helper()
	a, err := u.Begin(peer.NewContext(t.Context(), &peer.Peer{Addr: c.RemoteAddr()}))
	if err != nil {
		return nil, err
	}
	return a.Encode(size, func(b []byte) []byte { return append(b, make([]byte, size)...) })
}

// TestUnreadAnswersAreBounded has answers of several sizes until the share of the address is used up, and reads them.
func TestUnreadAnswersAreBounded(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1, smallAnswer, maxPooledAnswer, maxPooledAnswer + 1, callerror.MaxResponse} {
		u, c, _ := newUnread(t)
		var all []mem.BufferSlice
		for {
			b, err := answer(t, u, c, size)
			if err != nil {
				break
			}
			all = append(all, b)
		}
		if used := u.Total().Used(); used > maxUnreadBytesPerAddress || used < maxUnreadBytesPerAddress-int64(size)-callBytes || int64(len(all)*size) > used {
			t.Errorf("%d answers of %d bytes use %d", len(all), size, used)
		}
		for _, b := range all[1:] {
			b.Free()
		}
		if err := c.Close(); err != nil { // which releases the first
			t.Error(err)
		}
		all[0].Free()
		if _, err := answer(t, u, c, size); err != nil { // of a call that was in progress
			t.Error(err)
		}
		if u.Total().Used() != 0 {
			t.Errorf("%d bytes stay reserved", u.Total().Used())
		}
	}
}

// TestConnectionWithUnreadAnswerIsClosed has a client that reads some answers in time, and one not.
func TestConnectionWithUnreadAnswerIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u, c, tcp := newUnread(t)
		for range 10 {
			b, err := answer(t, u, c, 1)
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(u.timeout - time.Second)
			b.Free()
		}
		select {
		case <-tcp.closed:
			t.Fatal("a connection whose answers are read was closed")
		default:
		}
		if _, err := answer(t, u, c, 1); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		<-tcp.closed
		if took := time.Since(began); took < u.timeout || took > 2*u.timeout {
			t.Errorf("the connection was closed after %v, want one to two times %v", took, u.timeout)
		}
	})
}

// TestEndedStreamsThatAreNotReadWait ends streams with a message that is not read until there is no room for more, which wait for their clients.
func TestEndedStreamsThatAreNotReadWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u, c, tcp := newUnread(t)
		ctx := peer.NewContext(t.Context(), &peer.Peer{Addr: c.RemoteAddr()})
		const room, more = maxUnreadBytesPerAddress / streamBytes, 2
		var messages []mem.BufferSlice
		ended := make(chan struct{}, room+more)
		for range room + more {
			var sent Sent
			messages = append(messages, sent.Track(nil))
			go func() {
				u.End(ctx, &sent, nil)
				ended <- struct{}{}
			}()
			synctest.Wait()
		}
		if len(ended) != room {
			t.Errorf("%d streams have ended, want %d", len(ended), room)
		}
		messages[room].Free() // is read
		synctest.Wait()
		if len(ended) != room+1 {
			t.Errorf("%d streams have ended, want %d", len(ended), room+1)
		}
		began := time.Now()
		<-tcp.closed
		if took := time.Since(began); took != u.timeout {
			t.Errorf("the connection was closed after %v, want %v", took, u.timeout)
		}
	})
}
