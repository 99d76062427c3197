package bench

/*
#cgo pkg-config: libzmq
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

// The middle frame of three is the seq, 8 bytes, big-endian.
static int is_seq(zmq_msg_t *frame, uint64_t want) {
	const unsigned char *p = zmq_msg_data(frame);
	uint64_t seq = 0;
	if (zmq_msg_size(frame) != 8)
		return 0;
	for (int i = 0; i < 8; i++)
		seq = seq << 8 | p[i];
	return seq == want;
}

// drain receives n messages. If there is none it sleeps for 5 ms, at most max_idle times in a row.
static int drain(void *socket, uint64_t n, int max_idle, uint64_t *next, uint64_t *bytes) {
	const struct timespec pause = {0, 5000000};
	zmq_msg_t msg;
	uint64_t got = 0;
	int frame = 0, idle = 0, failed = 0;
	zmq_msg_init(&msg);
	while (got < n && !failed) {
		int size = zmq_msg_recv(&msg, socket, ZMQ_DONTWAIT);
		if (size < 0) {
			if (errno == EAGAIN && idle++ < max_idle)
				nanosleep(&pause, NULL);
			else if (errno == EAGAIN)
				failed = ETIMEDOUT;
			else if (errno != EINTR)
				failed = errno;
			continue;
		}
		idle = 0;
		*bytes += size;
		if (frame == 1 && !is_seq(&msg, (*next)++)) {
			failed = EBADMSG;
			continue;
		}
		frame++;
		if (!zmq_msg_more(&msg)) {
			frame = 0;
			got++;
		}
	}
	zmq_msg_close(&msg);
	return failed;
}

// write_seqs receives n messages, and writes the seq of each to a file descriptor.
static int write_seqs(void *socket, uint64_t n, int fd, uint64_t *next) {
	zmq_msg_t msg;
	uint64_t got = 0;
	int frame = 0, failed = 0;
	zmq_msg_init(&msg);
	while (got < n && !failed) {
		unsigned char seq[8];
		if (zmq_msg_recv(&msg, socket, 0) < 0) {
			if (errno != EINTR)
				failed = errno;
			continue;
		}
		if (frame == 1 && !is_seq(&msg, (*next)++))
			failed = EBADMSG;
		else if (frame == 1)
			memcpy(seq, zmq_msg_data(&msg), sizeof seq);
		frame++;
		if (zmq_msg_more(&msg))
			continue;
		if (!failed && write(fd, seq, sizeof seq) != sizeof seq)
			failed = EIO;
		frame = 0;
		got++;
	}
	zmq_msg_close(&msg);
	return failed;
}

static int set_int(void *socket, int option, int value) {
	return zmq_setsockopt(socket, option, &value, sizeof value);
}
*/
import "C"

import (
	"errors"
	"fmt"
	"syscall"
	"time"
	"unsafe"
)

// Receiver is a SUB socket that a C loop reads. The loop checks only the seqs, so that it has the minimum cost of
// receiving.
type Receiver struct {
	ctx, socket unsafe.Pointer
	next        C.uint64_t // seq of the next message
}

// receiveHWM is libzmq's queue length in messages, as in ingest.
const receiveHWM = 10_000

// IdlePause is how long a receiver of this package sleeps when its socket is empty, so that messages accumulate. Without
// the pause, it would have the cost of a wakeup per message, unlike a receiver that is always busy.
const IdlePause = 5 * time.Millisecond

// IdleLimit is how long a receiver waits for the next message before it fails.
const IdleLimit = 20 * time.Second

// NewReceiver returns a Receiver of all topics of a publisher whose first seq is 0. The caller
// closes it.
func NewReceiver(endpoint string) (*Receiver, error) {
	r := &Receiver{ctx: C.zmq_ctx_new()}
	if r.ctx == nil {
		return nil, errors.New("create ZeroMQ context: out of memory")
	}
	if r.socket = C.zmq_socket(r.ctx, C.ZMQ_SUB); r.socket == nil {
		return nil, errors.Join(zmqError("create socket"), r.Close())
	}
	address := C.CString(endpoint)
	defer C.free(unsafe.Pointer(address))
	if C.set_int(r.socket, C.ZMQ_RCVHWM, receiveHWM) != 0 ||
		C.set_int(r.socket, C.ZMQ_LINGER, 0) != 0 ||
		C.set_int(r.socket, C.ZMQ_RCVTIMEO, C.int(IdleLimit.Milliseconds())) != 0 ||
		C.zmq_setsockopt(r.socket, C.ZMQ_SUBSCRIBE, nil, 0) != 0 ||
		C.zmq_connect(r.socket, address) != 0 {
		return nil, errors.Join(zmqError("connect to "+endpoint), r.Close())
	}
	return r, nil
}

// Drain receives n messages, whose seqs must be contiguous, and returns the total size of their
// frames in bytes.
func (r *Receiver) Drain(n int) (bytes uint64, err error) {
	var sum C.uint64_t
	maxIdle := C.int(IdleLimit / IdlePause)
	if failed := C.drain(r.socket, C.uint64_t(n), maxIdle, &r.next, &sum); failed != 0 {
		return 0, fmt.Errorf("receive message %d: %w", uint64(r.next), syscall.Errno(failed))
	}
	return uint64(sum), nil
}

// WriteSeqs receives n messages, whose seqs must be contiguous, and writes the eight bytes of each seq
// to a file as soon as the message arrives.
func (r *Receiver) WriteSeqs(n, fd int) error {
	if failed := C.write_seqs(r.socket, C.uint64_t(n), C.int(fd), &r.next); failed != 0 {
		return fmt.Errorf("write seq of message %d: %w", uint64(r.next), syscall.Errno(failed))
	}
	return nil
}

// Close closes the socket.
func (r *Receiver) Close() error {
	var errs []error
	if r.socket != nil && C.zmq_close(r.socket) != 0 {
		errs = append(errs, zmqError("close socket"))
	}
	if C.zmq_ctx_term(r.ctx) != 0 {
		errs = append(errs, zmqError("end context"))
	}
	return errors.Join(errs...)
}

func zmqError(what string) error {
	return fmt.Errorf("%s: %s", what, C.GoString(C.zmq_strerror(C.zmq_errno())))
}
