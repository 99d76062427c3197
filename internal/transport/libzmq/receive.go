//go:build cgo

package libzmq

/*
#cgo pkg-config: libzmq
#include <errno.h>
#include <stdlib.h>
#include <zmq.h>

#cgo noescape transport_new
#cgo nocallback transport_new
#cgo noescape transport_receive
#cgo nocallback transport_receive
#cgo noescape transport_drop
#cgo nocallback transport_drop
#cgo noescape transport_peer
#cgo nocallback transport_peer
#cgo noescape transport_events
#cgo nocallback transport_events
#cgo noescape transport_release
#cgo nocallback transport_release

enum { KEPT_FRAMES = 4 }; // transport.KeptFrames

typedef struct {
	int count; // number of all frames
	int fd;    // of the connection
	struct {
		void *data;
		size_t size;
	} view[KEPT_FRAMES];
	zmq_msg_t frame[KEPT_FRAMES]; // has the data of short frames inside: must not be moved
} transport_message;

typedef struct {
	int room;
	int used;    // number of messages
	size_t size; // bytes of all kept frames
	transport_message *message;
} transport_batch;

// transport_new returns an empty batch with room for messages, or NULL. It is set up here because Go's write barrier
// reads the pointer that a store from Go replaces, and new memory may hold what looks like a pointer into Go's heap.
static transport_batch *transport_new(size_t room) {
	transport_batch *b = malloc(sizeof *b + room * sizeof *b->message);
	if (b != NULL)
		*b = (transport_batch){.room = (int)room, .message = (transport_message *)(b + 1)};
	return b;
}

static int transport_kept(const transport_message *m) {
	return m->count < KEPT_FRAMES ? m->count : KEPT_FRAMES;
}

static void transport_close(transport_message *m) {
	for (int i = 0; i < transport_kept(m); i++)
		zmq_msg_close(&m->frame[i]);
	m->count = 0;
}

static void transport_release(transport_batch *b) {
	for (int i = 0; i < b->used; i++)
		transport_close(&b->message[i]);
	b->used = 0;
	b->size = 0;
}

// transport_drop closes the frames of a message, which stays in the batch.
static void transport_drop(transport_batch *b, int i) {
	transport_message *m = &b->message[i];
	for (int k = 0; k < transport_kept(m); k++)
		b->size -= m->view[k].size;
	transport_close(m);
}

// transport_peer returns the address of a message's peer, in libzmq's memory, or NULL.
static const char *transport_peer(transport_batch *b, int i) {
	transport_message *m = &b->message[i];
	return m->count > 0 ? zmq_msg_gets(&m->frame[0], "Peer-Address") : NULL;
}

// transport_receive_frame returns 0, or an errno and a frame that is closed.
static int transport_receive_frame(zmq_msg_t *frame, void *socket) {
	zmq_msg_init(frame);
	while (zmq_msg_recv(frame, socket, ZMQ_DONTWAIT) < 0) {
		int err = errno;
		if (err != EINTR) {
			zmq_msg_close(frame);
			return err;
		}
	}
	return 0;
}

// transport_receive_message returns 0, or an errno and a message without frames.
static int transport_receive_message(transport_message *m, void *socket) {
	zmq_msg_t extra;
	int more = 1;
	m->count = 0;
	while (more) {
		int kept = m->count < KEPT_FRAMES;
		zmq_msg_t *frame = kept ? &m->frame[m->count] : &extra;
		int err = transport_receive_frame(frame, socket);
		if (err != 0) {
			transport_close(m);
			return err;
		}
		more = zmq_msg_more(frame);
		if (kept) {
			m->view[m->count].data = zmq_msg_data(frame);
			m->view[m->count].size = zmq_msg_size(frame);
		} else {
			zmq_msg_close(frame);
		}
		m->count++;
	}
	m->fd = zmq_msg_get(&m->frame[0], ZMQ_SRCFD);
	return 0;
}

// transport_receive adds messages until there is no room, or their frames have that many bytes. It returns an errno if it added none.
// libzmq delivers whole messages: only a first frame can yield EAGAIN.
static int transport_receive(transport_batch *b, void *socket, size_t bytes) {
	int before = b->used;
	while (b->used < b->room && b->size < bytes) {
		transport_message *m = &b->message[b->used];
		int err = transport_receive_message(m, socket);
		if (err != 0)
			return b->used > before || err == EAGAIN ? 0 : err;
		for (int k = 0; k < transport_kept(m); k++)
			b->size += m->view[k].size;
		b->used++;
	}
	return 0;
}

// transport_events returns the socket's ZMQ_EVENTS, or a negative errno.
static int transport_events(void *socket) {
	int events, rc;
	size_t size = sizeof events;
	do
		rc = zmq_getsockopt(socket, ZMQ_EVENTS, &events, &size);
	while (rc != 0 && errno == EINTR);
	return rc == 0 ? events : -errno;
}
*/
import "C"

import (
	"errors"
	"reflect"
	"runtime"
	"unsafe"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/internal/transport"
)

// The C functions above are declared nocallback. They would call Go code if a message had a free
// function in Go, and zmq4 creates no such message.

// checkHandle returns an error unless a zmq4.Socket begins with libzmq's handle, for which zmq4 has no method.
func checkHandle() error {
	f := reflect.TypeFor[zmq4.Socket]().Field(0)
	if f.Name != "soc" || f.Type.Kind() != reflect.UnsafePointer {
		return errors.New("open socket: unknown layout of zmq4.Socket; want github.com/pebbe/zmq4 v1.4.0")
	}
	return nil
}

// handle returns libzmq's handle. It returns nil after the socket is closed, and libzmq returns ENOTSOCK for nil. The socket must be kept
// alive while the handle is used, because the socket's finalizer closes the handle.
func handle(s *zmq4.Socket) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(s)) }

// views is libzmq's memory of a batch of messages.
type views struct{ c *C.transport_batch }

// newViews returns memory that is freed when owner is unreachable.
func newViews[T any](messages int, owner *T) views {
	c := C.transport_new(C.size_t(messages))
	if c == nil {
		panic("out of memory") // as Go's allocator ends the process
	}
	runtime.AddCleanup(owner, func(c *C.transport_batch) {
		C.transport_release(c)
		C.free(unsafe.Pointer(c))
	}, c)
	return views{c}
}

func (v views) release() { C.transport_release(v.c) }

func (v views) drop(i int) { C.transport_drop(v.c, C.int(i)) }

func (v views) peer(i int) string { return C.GoString(C.transport_peer(v.c, C.int(i))) }

func (v views) bytes() int { return int(v.c.size) }

// receive adds messages with one call to C, without copying.
func (s *Socket) receive(b *Batch) error {
	err := C.transport_receive(b.views.c, handle(s.zmq), maxBatchBytes)
	runtime.KeepAlive(s.zmq)
	if err != 0 {
		return zmq4.Errno(err)
	}
	for n := int(b.views.c.used); b.n < n; b.n++ {
		m := &unsafe.Slice(b.views.c.message, n)[b.n]
		frames := b.frames[b.n*transport.KeptFrames:][:min(int(m.count), transport.KeptFrames):transport.KeptFrames]
		for k := range frames {
			frames[k] = unsafe.Slice((*byte)(m.view[k].data), m.view[k].size)
		}
		b.messages[b.n] = transport.Message{Frames: frames, Count: int(m.count), Conn: int(m.fd)}
	}
	return nil
}

// events returns the socket's ZMQ_EVENTS.
func (s *Socket) events() (zmq4.State, error) {
	events := C.transport_events(handle(s.zmq))
	runtime.KeepAlive(s.zmq)
	if events < 0 {
		return 0, zmq4.Errno(-events)
	}
	return zmq4.State(events), nil
}
