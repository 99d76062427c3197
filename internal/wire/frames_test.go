package wire_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/wire"
)

func TestParseTopic(t *testing.T) {
	for _, c := range []struct {
		topic string
		want  wire.Topic
		host  string
		err   string
	}{
		{"kv@10.0.0.1@m", wire.Topic{Pod: "10.0.0.1", Model: "m"}, "10.0.0.1", ""},
		{"kv@10.0.0.1:8000@org/m", wire.Topic{Pod: "10.0.0.1:8000", Model: "org/m"}, "10.0.0.1", ""},
		{"kv@pod@m@v2@", wire.Topic{Pod: "pod", Model: "m@v2@"}, "pod", ""},
		{"kv@[fd00::1]:8000@m", wire.Topic{Pod: "[fd00::1]:8000", Model: "m"}, "fd00::1", ""},
		{"kv@[fd00::1]@m", wire.Topic{Pod: "[fd00::1]", Model: "m"}, "fd00::1", ""},
		{"kv@fd00::1@m", wire.Topic{Pod: "fd00::1", Model: "m"}, "fd00::1", ""},
		{"kv@p@m\x00sgl-kv-epoch=0aF", wire.Topic{Pod: "p", Model: "m"}, "p", ""},
		{"kv@p@m\x00sgl-kv-epoch=1\x00sgl-kv-snapshot=s", wire.Topic{Pod: "p", Model: "m"}, "p", ""},
		{"kv@p@m\x00new=1", wire.Topic{Pod: "p", Model: "m"}, "p", ""},
		{"kv@p@m\x00sgl-kv-epoch=xyz", wire.Topic{}, "", "epoch is not hexadecimal"},
		{"", wire.Topic{}, "", "not kv@<pod[:port]>@<model>"},
		{"kv-events", wire.Topic{}, "", "not kv@<pod[:port]>@<model>"},
		{"kv@p", wire.Topic{}, "", "not kv@<pod[:port]>@<model>"},
		{"kv@p@", wire.Topic{}, "", "not kv@<pod[:port]>@<model>"},
		{"kv@@m", wire.Topic{}, "", "not kv@<pod[:port]>@<model>"},
		{"KV@p@m", wire.Topic{}, "", "not kv@<pod[:port]>@<model>"},
		{"kv@p@\xff", wire.Topic{}, "", "not kv@<pod[:port]>@<model>"},
		{"kv@p\x00@m", wire.Topic{}, "", "not kv@<pod[:port]>@<model>"},
	} {
		got, err := wire.ParseTopic([]byte(c.topic))
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("ParseTopic(%q): error %v, want %v", c.topic, err, c.err)
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("ParseTopic(%q) differs (-want +got):\n%s", c.topic, diff)
		}
		if got.Host() != c.host {
			t.Errorf("host of %q is %q, want %q", c.topic, got.Host(), c.host)
		}
	}
}

func TestCutTopic(t *testing.T) {
	name, epoch := wire.CutTopic([]byte("kv-events\x00sgl-kv-epoch=ff\x00sgl-kv-snapshot=7"))
	got := []string{string(name), string(epoch)}
	if diff := cmp.Diff([]string{"kv-events", "ff"}, got); diff != "" {
		t.Errorf("parts differ (-want +got):\n%s", diff)
	}
	topic := []byte("kv@p@m\x00sgl-kv-epoch=ff")
	if allocs := testing.AllocsPerRun(100, func() { wire.CutTopic(topic) }); allocs != 0 {
		t.Errorf("%v allocations, want 0", allocs)
	}
}

// FuzzParseTopic checks that a parsed topic consists of its parts.
func FuzzParseTopic(f *testing.F) {
	for _, s := range []string{"kv@10.0.0.1:8000@org/m@v2", "kv-events", "kv@[::1]:1@m", "kv@p@m\x00sgl-kv-epoch=ff\x00sgl-kv-snapshot=s"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, topic []byte) {
		got, err := wire.ParseTopic(topic)
		if err != nil {
			return
		}
		name, _ := wire.CutTopic(topic)
		if want := "kv@" + got.Pod + "@" + got.Model; want != string(name) || got.Pod == "" || got.Model == "" {
			t.Errorf("ParseTopic(%q) = %+v", topic, got)
		}
		_ = got.Host()
	})
}

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
		{"ATOM's end", []string{"", seq(math.MaxUint64), "\x92\x00\x07"}, 0, "", true, nil},
		{"largest seq", []string{"", seq(math.MaxUint64 - 1), "p"}, math.MaxUint64 - 1, "p", false, nil},
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

// FuzzParseReply checks that a parsed reply comes from the last two frames.
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
			if !bytes.Equal(number, bytes.Repeat([]byte{0xff}, 8)) {
				t.Errorf("seq %x is parsed as the end marker", number)
			}
		case seq != binary.BigEndian.Uint64(number) || !bytes.Equal(got, payload):
			t.Errorf("seq %d of %x", seq, number)
		}
	})
}
