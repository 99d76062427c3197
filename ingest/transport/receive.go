package transport

/*
#cgo pkg-config: libzmq
#include <errno.h>
#include <stdlib.h>
#include <zmq.h>

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

enum { ZMQIO_KEPT = 4 };

typedef struct {
	int count; // number of all frames
	int fd;    // of the connection
	struct {
		void *data;
		size_t size;
	} view[ZMQIO_KEPT];
	zmq_msg_t frame[ZMQIO_KEPT]; // short ones lie within: none may be moved
} transport_message;

typedef struct {
	int room;
	int used; // number of messages
	size_t size; // bytes of their frames that are kept
	transport_message *message;
} transport_batch;

static transport_batch *transport_new(int room) {
	transport_batch *b = malloc(sizeof *b);
	if (b == NULL)
		return NULL;
	b->room = room;
	b->used = 0;
	b->size = 0;
	b->message = malloc(room * sizeof *b->message);
	if (b->message == NULL) {
		free(b);
		return NULL;
	}
	return b;
}

static int transport_kept(const transport_message *m) {
	return m->count < ZMQIO_KEPT ? m->count : ZMQIO_KEPT;
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

static void transport_free(transport_batch *b) {
	transport_release(b);
	free(b->message);
	free(b);
}

static int transport_receive_frame(zmq_msg_t *frame, void *socket) {
	int rc;
	zmq_msg_init(frame);
	do
		rc = zmq_msg_recv(frame, socket, ZMQ_DONTWAIT);
	while (rc < 0 && errno == EINTR);
	if (rc < 0)
		rc = -errno;
	if (rc < 0)
		zmq_msg_close(frame);
	return rc < 0 ? rc : 0;
}

// transport_receive_message returns 0 or a negative errno; then it holds no frame.
static int transport_receive_message(transport_message *m, void *socket) {
	zmq_msg_t dropped;
	int more = 1;
	m->count = 0;
	while (more) {
		zmq_msg_t *frame = m->count < ZMQIO_KEPT ? &m->frame[m->count] : &dropped;
		int rc = transport_receive_frame(frame, socket);
		if (rc < 0) {
			transport_close(m);
			return rc;
		}
		more = zmq_msg_more(frame);
		if (frame == &dropped) {
			zmq_msg_close(frame);
		} else {
			m->view[m->count].data = zmq_msg_data(frame);
			m->view[m->count].size = zmq_msg_size(frame);
		}
		m->count++;
	}
	m->fd = zmq_msg_get(&m->frame[0], ZMQ_SRCFD);
	return 0;
}

// transport_receive adds messages until there is no room, or their frames come to so many
// bytes, and returns how many there are, or a negative errno if it added none. libzmq
// delivers whole messages: EAGAIN concerns the first frame only.
static int transport_receive(transport_batch *b, void *socket, size_t bytes) {
	int before = b->used;
	while (b->used < b->room && b->size < bytes) {
		transport_message *m = &b->message[b->used];
		int rc = transport_receive_message(m, socket);
		if (rc < 0)
			return b->used > before || rc == -EAGAIN ? b->used : rc;
		for (int k = 0; k < transport_kept(m); k++)
			b->size += m->view[k].size;
		b->used++;
	}
	return b->used;
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
	"reflect"
	"runtime"
	"unsafe"

	"github.com/pebbe/zmq4"
)

// The C functions call no Go code, as declared above, because zmq4 creates no message with
// a free function of its own.

// handleKnown reports whether a zmq4.Socket begins with libzmq's handle, for which zmq4 has
// no method. Otherwise messages are received with zmq4's methods.
var handleKnown = func() bool {
	t := reflect.TypeFor[zmq4.Socket]()
	if t.Kind() != reflect.Struct || t.NumField() == 0 {
		return false
	}
	f := t.Field(0)
	return f.Name == "soc" && f.Type.Kind() == reflect.UnsafePointer && f.Offset == 0
}()

// handle returns libzmq's handle; nil once the socket is closed, for which libzmq returns
// ENOTSOCK. The socket must be kept alive while the handle is used, as its finalizer closes
// it.
func handle(s *zmq4.Socket) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(s)) }

// views is libzmq's memory of a batch of messages.
type views struct{ c *C.transport_batch }

// newViews returns memory that is released when owner is unreachable.
func newViews[T any](messages int, owner *T) views {
	c := C.transport_new(C.int(messages))
	if c == nil {
		panic("zmqio: out of memory")
	}
	runtime.AddCleanup(owner, func(c *C.transport_batch) { C.transport_free(c) }, c)
	return views{c}
}

func (t views) release() { C.transport_release(t.c) }

func (t views) drop(i int) { C.transport_drop(t.c, C.int(i)) }

func (t views) peer(i int) string { return C.GoString(C.transport_peer(t.c, C.int(i))) }

func (t views) bytes() int { return int(t.c.size) }

// receiveViews adds messages with one call to C, without copying.
func (s *Socket) receiveViews(b *Batch) error {
	n := C.transport_receive(b.views.c, handle(s.zmq), MaxBatchBytes)
	runtime.KeepAlive(s.zmq)
	if n < 0 {
		return zmq4.Errno(-n)
	}
	for i := b.n; i < int(n); i++ {
		m := &unsafe.Slice(b.views.c.message, n)[i]
		kept := min(int(m.count), keptFrames)
		frames := b.kept(i)
		for j := range kept {
			frames[j] = unsafe.Slice((*byte)(m.view[j].data), m.view[j].size)
		}
		b.messages[i] = Message{Frames: frames[:kept:kept], Count: int(m.count), FD: int(m.fd)}
	}
	b.n = int(n)
	return nil
}

// events returns the socket's ZMQ_EVENTS.
func (s *Socket) events() (zmq4.State, error) {
	if !s.views {
		return s.zmq.GetEvents()
	}
	events := C.transport_events(handle(s.zmq))
	runtime.KeepAlive(s.zmq)
	if events < 0 {
		return 0, zmq4.Errno(-events)
	}
	return zmq4.State(events), nil
}
