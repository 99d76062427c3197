package zmtp_test

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/zmtp"
)

// recordings returns what peers have sent, by name.
func recordings(t testing.TB) map[string][]byte {
	t.Helper()
	paths, err := filepath.Glob("testdata/recordings/*.bin")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no recordings: %v", err)
	}
	all := make(map[string][]byte)
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		all[strings.TrimSuffix(filepath.Base(path), ".bin")] = b
	}
	return all
}

// recordedEvents returns the last events of a recording.
func recordedEvents(name string) []string {
	frame := func(size int) string {
		b := make([]byte, size)
		for i := range b {
			b[i] = byte(i % 251)
		}
		return string(b)
	}
	if strings.HasSuffix(name, "-router") {
		seq, end := strings.Repeat("\x00", 7), strings.Repeat("\xff", 8)
		return []string{"message |" + seq + "b|" + frame(98), "message |" + seq + "c|" + frame(99), "message |" + end + "|"}
	}
	return []string{"message kv@topic", "message kv@topic|" + frame(300), "message kv@topic|" + frame(8) + "|" + frame(100)}
}

// TestRecordedPeers checks that what other implementations send is accepted, in whatever parts it
// arrives, and that their PINGs are answered.
func TestRecordedPeers(t *testing.T) {
	socketOf := map[bool]zmtp.SocketType{false: zmtp.SUB, true: zmtp.DEALER}
	var libraries []string
	for name, stream := range recordings(t) {
		library, _, _ := strings.Cut(name, "-pub")
		libraries = append(libraries, library)
		t.Run(name, func(t *testing.T) {
			for _, part := range []int{1, 7, len(stream)} {
				s := newSide(zmtp.Config{Socket: socketOf[strings.HasSuffix(name, "-router")], Topic: "kv@"})
				var sent []byte
				for rest := stream; len(rest) > 0; {
					n := min(part, len(rest))
					s.receive(rest[:n])
					sent = append(sent, s.Out()...)
					rest = rest[n:]
				}
				if s.err != nil || len(s.in) > 0 || !s.Established() {
					t.Fatalf("established %v, error %v, %d bytes left", s.Established(), s.err, len(s.in))
				}
				want := recordedEvents(name)
				if len(s.events) <= len(want) || s.events[0] != "established" {
					t.Fatalf("got events %q", s.events)
				}
				if diff := cmp.Diff(want, s.events[len(s.events)-len(want):]); diff != "" {
					t.Error(diff)
				}
				pings, pongs := bytes.Count(stream, []byte("\x04PING")), bytes.Count(sent, []byte("\x04PONG"))
				if strings.HasSuffix(name, "-heartbeats") == (pings == 0) || pings != pongs {
					t.Errorf("%d PINGs, %d PONGs", pings, pongs)
				}
			}
		})
	}
	for _, library := range []string{"go-zeromq", "jeromq", "libzmq", "pyzmq", "rust"} {
		if !slices.Contains(libraries, library) {
			t.Errorf("there is no recording of %s", library)
		}
	}
}
