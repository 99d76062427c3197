package enginegrpc_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/enginegrpc"
	"github.com/kvcast/kvcast/test/harness"
)

// wantUnused waits until no memory is in use.
func wantUnused(t *testing.T, tr *enginegrpc.Transport) {
	t.Helper()
	harness.WaitFor(t, func() bool { return tr.Used() == 0 && tr.Waiting() == 0 })
}

// Large responses of several engines wait for memory, and are neither lost nor in memory together.
func TestLargeResponsesShareTheMemory(t *testing.T) {
	t.Parallel()
	const calls, limit = 4, 20 << 20 // one of the largest responses, or the payload of one
	tr := enginegrpc.New(enginegrpc.Config{Bytes: limit, Grace: harness.Timeout})
	event := largeEvent(1 << 20) // 3 MiB, and 5 MiB in vLLM's form
	s := newServer(t, vllmMethod)
	var sending sync.WaitGroup
	t.Cleanup(sending.Wait)
	chunks := make(chan func(), calls) // each recycles a chunk that has a message
	for range calls {
		r := subscribeBy(t, tr, enginegrpc.Subscription{Endpoint: smgEndpoint(s)}, harness.Timeout)
		c := s.accept(vllmMethod, nil)
		c.header()
		r.want("connected")
		sending.Go(func() { _ = c.Send(append(message{}.number(1, 7), event...)) })
		sending.Go(func() {
			chunk, err := r.Next(func() time.Time { return time.Now().Add(harness.Timeout) })
			if err != nil || len(chunk.Messages) != 1 || binary.BigEndian.Uint64(chunk.Messages[0].Frames[1]) != 7 {
				t.Errorf("chunk %+v, error %v, want batch 7", chunk, err)
				chunks <- func() {}
				return
			}
			chunks <- func() { r.Recycle(chunk) }
		})
	}
	for i := range calls {
		recycle := <-chunks
		// While the payload is not processed, there is no memory for another response.
		harness.WaitFor(t, func() bool { return tr.Waiting() == calls-1-i })
		if used := tr.Used(); used < 5<<20 || used > limit || len(chunks) > 0 {
			t.Errorf("%d bytes are in use, and %d further messages, want %d to %d and none", used, len(chunks), 5<<20, limit)
		}
		recycle()
	}
	wantUnused(t, tr)
}

// The memory of messages that are not processed is bounded, also if each is small.
func TestSmallResponsesShareTheMemory(t *testing.T) {
	t.Parallel()
	const calls, batches, limit = 8, 20, 1 << 20
	tr := enginegrpc.New(enginegrpc.Config{Bytes: limit})
	event := largeEvent(10_000) // 30 kB, and 50 kB in vLLM's form
	s := newServer(t, vllmMethod)
	var running sync.WaitGroup
	t.Cleanup(running.Wait)
	for range calls {
		r := subscribeBy(t, tr, enginegrpc.Subscription{Endpoint: smgEndpoint(s)}, harness.Timeout)
		c := s.accept(vllmMethod, nil)
		c.header()
		r.want("connected")
		running.Go(func() {
			for seq := range int64(batches) {
				_ = c.Send(append(message{}.number(1, seq), event...))
			}
		})
		running.Go(func() {
			for len(r.lines) < batches && r.read() {
				if used := tr.Used(); used > limit {
					t.Errorf("%d bytes are in use, want at most %d", used, limit)
				}
			}
			for i, got := range r.lines {
				if want := fmt.Sprintf("%d of rank 0 with 1 events", i); got != want {
					t.Errorf("line %d is %q, want %q", i, got, want)
				}
			}
			if r.err != nil {
				t.Error(r.err)
			}
		})
	}
	running.Wait()
	wantUnused(t, tr)
}

// A response that does not become complete does not keep the memory from others. The next call resumes.
func TestIncompleteResponseIsEvicted(t *testing.T) {
	t.Parallel()
	tr := enginegrpc.New(enginegrpc.Config{Bytes: 1 << 20, Grace: 10 * time.Millisecond})
	stalled := subscribeBy(t, tr, enginegrpc.Subscription{Endpoint: "smg://" + stallingServer(t)}, harness.Timeout)
	stalled.want("connected")
	harness.WaitFor(t, func() bool { return tr.Used() > 0 })
	s := newServer(t, vllmMethod)
	r := subscribeBy(t, tr, enginegrpc.Subscription{Endpoint: smgEndpoint(s)}, harness.Timeout)
	c := s.accept(vllmMethod, nil)
	c.send(smgStored(0, 3))
	r.want("connected", "3 of rank 0")
	stalled.want("disconnected, lost false: rpc error: code = Unavailable")
	stalled.wantEnd(transport.ErrEnded)
	wantUnused(t, tr)
}

// Interrupt ends the wait for memory, and Close releases the memory of messages that were not read.
func TestInterruptWithoutMemory(t *testing.T) {
	t.Parallel()
	tr := enginegrpc.New(enginegrpc.Config{Bytes: 1 << 10, Grace: harness.Timeout})
	s := newServer(t, vllmMethod)
	first := subscribeBy(t, tr, enginegrpc.Subscription{Endpoint: smgEndpoint(s)}, harness.Timeout)
	c := s.accept(vllmMethod, nil)
	c.send(smgStored(0, 1))
	harness.WaitFor(t, func() bool { return tr.Used() > 0 })
	second := subscribeBy(t, tr, enginegrpc.Subscription{Endpoint: smgEndpoint(s)}, harness.Timeout)
	c = s.accept(vllmMethod, nil)
	c.send(smgStored(0, 1))
	harness.WaitFor(t, func() bool { return tr.Waiting() == 1 })
	second.Interrupt()
	harness.WaitFor(t, func() bool { return tr.Waiting() == 0 })
	if err := first.Close(); err != nil {
		t.Error(err)
	}
	wantUnused(t, tr)
}

// stallingServer returns the address of a server whose first response does not end. It tells the test if the client accepts
// compressed responses.
func stallingServer(t *testing.T) (address string) {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { _ = l.Close(); <-done })
	go func() {
		defer close(done)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer func() { _ = c.Close() }()
		stop := context.AfterFunc(t.Context(), func() { _ = c.Close() })
		defer stop()
		if err := stall(t, c); err != nil {
			t.Errorf("serve: %v", err)
		}
	}()
	return l.Addr().String()
}

// stall answers a call with the beginning of the largest response.
func stall(t *testing.T, c net.Conn) error {
	if _, err := io.ReadFull(c, make([]byte, len(http2.ClientPreface))); err != nil {
		return err
	}
	f := http2.NewFramer(c, c)
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if err := f.WriteSettings(); err != nil {
		return err
	}
	const header = 5
	window := 65535 - header // of the stream; that of the connection does not stop the client from reading
	left := 0                // what is still to be sent; the call may not have begun
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return nil //nolint:nilerr // the client has closed the connection
		}
		switch frame := frame.(type) {
		case *http2.MetaHeadersFrame:
			for _, h := range frame.Fields {
				if h.Name == "grpc-accept-encoding" && h.Value != "identity" {
					t.Errorf("the client accepts responses that are compressed: %s", h.Value)
				}
			}
			var headers bytes.Buffer
			e := hpack.NewEncoder(&headers)
			_ = e.WriteField(hpack.HeaderField{Name: ":status", Value: "200"})
			_ = e.WriteField(hpack.HeaderField{Name: "content-type", Value: "application/grpc"})
			if err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: headers.Bytes(), EndHeaders: true}); err != nil {
				return err
			}
			if err := f.WriteData(1, false, binary.BigEndian.AppendUint32([]byte{0}, transport.MaxPayloadBytes)); err != nil {
				return err
			}
			left = transport.MaxPayloadBytes / 2
		case *http2.WindowUpdateFrame:
			if frame.StreamID == 1 {
				window += int(frame.Increment)
			}
		}
		for n := min(window, left, 16<<10); n > 0; n = min(window, left, 16<<10) {
			if f.WriteData(1, false, make([]byte, n)) != nil {
				return nil //nolint:nilerr // the same
			}
			window, left = window-n, left-n
		}
	}
}

// A payload is not larger than the memory that was claimed for it.
func TestPayloadsGrowLessThanTheirMemory(t *testing.T) {
	t.Parallel()
	smg := func(field protowire.Number, event message) message {
		return message{}.message(3, message{}.message(field, event))
	}
	open := func(field protowire.Number, event message) message {
		return message{}.message(4, message{}.message(field, event))
	}
	for name, tt := range map[string]struct {
		protocol string
		event    message
	}{
		"SMG, clears":                 {config.TransportSMG, smg(4, nil)},
		"SMG, removes of nothing":     {config.TransportSMG, smg(3, nil)},
		"SMG, stores of empty blocks": {config.TransportSMG, smg(2, message{}.message(1, nil))},
		"SMG, an empty block":         {config.TransportSMG, smg(2, bytes.Repeat(message{}.message(1, nil), 1000))},
		"OpenEngine, clears":          {config.TransportOpenEngine, open(12, nil)},
		"OpenEngine, removes":         {config.TransportOpenEngine, open(11, nil)},
		"OpenEngine, empty stores":    {config.TransportOpenEngine, open(10, nil)},
	} {
		events := bytes.Repeat(tt.event, 1000)
		response := message(events)
		if tt.protocol == config.TransportOpenEngine {
			response = message{}.message(1, events)
		}
		c, err := enginegrpc.Convert(tt.protocol, response)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if most := enginegrpc.ClaimBytes(len(response)); int64(cap(c.Payload)) > most {
			t.Errorf("%s: a payload of %d bytes of a response of %d, for which %d are claimed", name, cap(c.Payload), len(response), most)
		}
		t.Logf("%s: %d -> %d", name, len(response), len(c.Payload))
	}
}
