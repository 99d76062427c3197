package zmqio

/*
#cgo pkg-config: libzmq
#include <errno.h>
#include <stdlib.h>
#include <zmq.h>

#cgo noescape zmqio_receive
#cgo nocallback zmqio_receive
#cgo noescape zmqio_drop
#cgo nocallback zmqio_drop
#cgo noescape zmqio_peer
#cgo nocallback zmqio_peer
#cgo noescape zmqio_events
#cgo nocallback zmqio_events
#cgo noescape zmqio_release
#cgo nocallback zmqio_release

enum { ZMQIO_KEPT = 4 };

typedef struct {
	int count; // frames, those that are not kept included
	int fd;    // of the connection
	struct {
		void *data;
		size_t size;
	} view[ZMQIO_KEPT];
	zmq_msg_t frame[ZMQIO_KEPT]; // short ones lie within: none may be moved
} zmqio_message;

typedef struct {
	int room;
	int used; // how many of the messages there are
	size_t size; // bytes of their frames that are kept
	zmqio_message *message;
} zmqio_batch;

static zmqio_batch *zmqio_new(int room) {
	zmqio_batch *b = malloc(sizeof *b);
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

static int zmqio_kept(const zmqio_message *m) {
	return m->count < ZMQIO_KEPT ? m->count : ZMQIO_KEPT;
}

static void zmqio_close(zmqio_message *m) {
	for (int i = 0; i < zmqio_kept(m); i++)
		zmq_msg_close(&m->frame[i]);
	m->count = 0;
}

static void zmqio_release(zmqio_batch *b) {
	for (int i = 0; i < b->used; i++)
		zmqio_close(&b->message[i]);
	b->used = 0;
	b->size = 0;
}

// zmqio_drop gives back the frames of a message that stays in its place.
static void zmqio_drop(zmqio_batch *b, int i) {
	zmqio_message *m = &b->message[i];
	for (int k = 0; k < zmqio_kept(m); k++)
		b->size -= m->view[k].size;
	zmqio_close(m);
}

// zmqio_peer returns the address of the peer that sent a message, which is libzmq's
// memory, or NULL.
static const char *zmqio_peer(zmqio_batch *b, int i) {
	zmqio_message *m = &b->message[i];
	return m->count > 0 ? zmq_msg_gets(&m->frame[0], "Peer-Address") : NULL;
}

static void zmqio_free(zmqio_batch *b) {
	zmqio_release(b);
	free(b->message);
	free(b);
}

static int zmqio_receive_frame(zmq_msg_t *frame, void *socket) {
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

// zmqio_receive_message returns 0 or a negative errno; then it holds no frame.
static int zmqio_receive_message(zmqio_message *m, void *socket) {
	zmq_msg_t dropped;
	int more = 1;
	m->count = 0;
	while (more) {
		zmq_msg_t *frame = m->count < ZMQIO_KEPT ? &m->frame[m->count] : &dropped;
		int rc = zmqio_receive_frame(frame, socket);
		if (rc < 0) {
			zmqio_close(m);
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

// zmqio_receive adds messages until there is no room, or their frames come to so many
// bytes, and returns how many there are, or a negative errno if it added none. libzmq
// hands messages on whole: EAGAIN is about the first frame only.
static int zmqio_receive(zmqio_batch *b, void *socket, size_t bytes) {
	int before = b->used;
	while (b->used < b->room && b->size < bytes) {
		zmqio_message *m = &b->message[b->used];
		int rc = zmqio_receive_message(m, socket);
		if (rc < 0)
			return b->used > before || rc == -EAGAIN ? b->used : rc;
		for (int k = 0; k < zmqio_kept(m); k++)
			b->size += m->view[k].size;
		b->used++;
	}
	return b->used;
}

// zmqio_events returns the socket's ZMQ_EVENTS, or a negative errno.
static int zmqio_events(void *socket) {
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

// That C calls nothing of Go, as it promises above, is so because zmq4 makes no
// message of memory with a free function of its own.

// handleKnown tells that a zmq4.Socket begins with libzmq's handle, which zmq4 has
// no method for. Where it does not, messages are received with zmq4's own methods.
var handleKnown = func() bool {
	t := reflect.TypeFor[zmq4.Socket]()
	if t.Kind() != reflect.Struct || t.NumField() == 0 {
		return false
	}
	f := t.Field(0)
	return f.Name == "soc" && f.Type.Kind() == reflect.UnsafePointer && f.Offset == 0
}()

// handle is libzmq's; nil once the socket is closed, which libzmq answers with
// ENOTSOCK. The socket must be kept alive while it is used: without, its
// finalizer closes it.
func handle(s *zmq4.Socket) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(s)) }

// taken is libzmq's memory of a batch of messages.
type taken struct{ c *C.zmqio_batch }

// newTaken returns memory that is given back once owner is unreachable.
func newTaken[T any](messages int, owner *T) taken {
	c := C.zmqio_new(C.int(messages))
	if c == nil {
		panic("zmqio: out of memory")
	}
	runtime.AddCleanup(owner, func(c *C.zmqio_batch) { C.zmqio_free(c) }, c)
	return taken{c}
}

func (t taken) release() { C.zmqio_release(t.c) }

func (t taken) drop(i int) { C.zmqio_drop(t.c, C.int(i)) }

func (t taken) peer(i int) string { return C.GoString(C.zmqio_peer(t.c, C.int(i))) }

func (t taken) bytes() int { return int(t.c.size) }

// receiveViews adds messages with one call to C, without copying.
func (s *Socket) receiveViews(b *Batch) error {
	n := C.zmqio_receive(b.taken.c, handle(s.zmq), MaxBatchBytes)
	runtime.KeepAlive(s.zmq)
	if n < 0 {
		return zmq4.Errno(-n)
	}
	for i := b.n; i < int(n); i++ {
		m := &unsafe.Slice(b.taken.c.message, n)[i]
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

// events is what libzmq says about the socket.
func (s *Socket) events() (zmq4.State, error) {
	if !s.views {
		return s.zmq.GetEvents()
	}
	events := C.zmqio_events(handle(s.zmq))
	runtime.KeepAlive(s.zmq)
	if events < 0 {
		return 0, zmq4.Errno(-events)
	}
	return zmq4.State(events), nil
}
