package wire_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"testing"

	"github.com/kvcast/kvcast/ingest/wire"
)

func TestParseReply(t *testing.T) {
	seq := func(n uint64) string { return string(binary.BigEndian.AppendUint64(nil, n)) }
	for _, c := range []struct {
		name    string
		frames  []string
		seq     uint64
		payload string
		end     bool
		err     error
	}{
		{"old vLLM", []string{"", seq(7), "p"}, 7, "p", false, nil},
		{"new vLLM", []string{"", "topic", seq(7), "p"}, 7, "p", false, nil},
		{"topic of eight bytes", []string{"", "8 bytes.", seq(7), "p"}, 7, "p", false, nil},
		{"no delimiter", []string{seq(7), "p"}, 7, "p", false, nil},
		{"end", []string{"", seq(math.MaxUint64), ""}, 0, "", true, nil},
		{"end with topic", []string{"", "", seq(math.MaxUint64), ""}, 0, "", true, nil},
		{"largest seq", []string{"", seq(math.MaxUint64), "p"}, math.MaxUint64, "p", false, nil},
		{"empty payload", []string{"", seq(0), ""}, 0, "", false, nil},
		{"short seq", []string{"", "1234567", "p"}, 0, "", false, wire.ErrReply},
		{"one frame", []string{"p"}, 0, "", false, wire.ErrReply},
		{"no frames", nil, 0, "", false, wire.ErrReply},
	} {
		t.Run(c.name, func(t *testing.T) {
			var frames [][]byte
			for _, f := range c.frames {
				frames = append(frames, []byte(f))
			}
			seq, payload, end, err := wire.ParseReply(frames)
			if seq != c.seq || string(payload) != c.payload || end != c.end || !errors.Is(err, c.err) {
				t.Errorf("got %d, %q, %v, %v; want %d, %q, %v, %v", seq, payload, end, err, c.seq, c.payload, c.end, c.err)
			}
		})
	}
}

// FuzzParseReply checks that what parses stands in the last two frames.
func FuzzParseReply(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x00\x00\x00\x00\x07"), []byte("p"), true)
	f.Add(bytes.Repeat([]byte{0xff}, 8), []byte(nil), false)
	f.Add([]byte("seq"), []byte("p"), false)
	for _, v := range readVectors(f) {
		f.Add(make([]byte, 8), v.payload, true)
	}
	f.Fuzz(func(t *testing.T, number, payload []byte, topic bool) {
		frames := [][]byte{nil, number, payload}
		if topic {
			frames = [][]byte{nil, []byte("topic"), number, payload}
		}
		seq, got, end, err := wire.ParseReply(frames)
		switch {
		case (err == nil) != (len(number) == 8):
			t.Errorf("error %v for a seq of %d bytes", err, len(number))
		case err != nil:
		case end:
			if !bytes.Equal(number, bytes.Repeat([]byte{0xff}, 8)) || len(payload) != 0 {
				t.Errorf("%x with %d bytes of payload is taken for the end", number, len(payload))
			}
		case seq != binary.BigEndian.Uint64(number) || !bytes.Equal(got, payload):
			t.Errorf("seq %d of %x", seq, number)
		}
	})
}
