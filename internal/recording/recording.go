// Package recording reads recorded traffic of engines.
//
// A file of JSON values flows in, one a message, compressed with gzip if the file's name ends in
// .gz. The ZeroMQ frames of each message flow out, in order. An error has the number of the
// message.
package recording

import (
	"compress/gzip"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"strings"
)

// IsName reports whether a file name has a recording's suffix: .jsonl or .jsonl.gz.
func IsName(name string) bool {
	return strings.HasSuffix(name, ".jsonl") || strings.HasSuffix(name, ".jsonl.gz")
}

// ReadFile yields the messages of a file. An error is the last value.
func ReadFile(name string) iter.Seq2[[][]byte, error] {
	return func(yield func([][]byte, error) bool) {
		f, err := os.Open(name)
		if err != nil {
			yield(nil, err) // err contains the file name
			return
		}
		defer func() { _ = f.Close() }()
		var r io.Reader = f
		if strings.HasSuffix(name, ".gz") {
			if r, err = gzip.NewReader(f); err != nil {
				yield(nil, fmt.Errorf("open recording %s: %w", name, err))
				return
			}
		}
		for frames, err := range Read(r) {
			if err != nil {
				err = fmt.Errorf("read recording %s: %w", name, err)
			}
			if !yield(frames, err) {
				return
			}
		}
	}
}

// Read yields the messages of a stream of JSON values. A value is an array of frames in
// hexadecimal, or an object with such an array as "frames". An error is the last value.
func Read(r io.Reader) iter.Seq2[[][]byte, error] {
	return func(yield func([][]byte, error) bool) {
		lines := json.NewDecoder(r)
		for n := 1; ; n++ {
			frames, err := readMessage(lines)
			if errors.Is(err, io.EOF) {
				return
			}
			if err != nil {
				yield(nil, fmt.Errorf("message %d: %w", n, err))
				return
			}
			if !yield(frames, nil) {
				return
			}
		}
	}
}

func readMessage(lines *json.Decoder) ([][]byte, error) {
	var raw json.RawMessage
	if err := lines.Decode(&raw); err != nil {
		return nil, err
	}
	var message struct {
		Frames []string `json:"frames"`
	}
	err := json.Unmarshal(raw, &message.Frames)
	if err != nil {
		err = json.Unmarshal(raw, &message)
	}
	if err != nil || len(message.Frames) == 0 {
		return nil, errors.New(`want an array of frames in hexadecimal, or an object with one as "frames"`)
	}
	frames := make([][]byte, len(message.Frames))
	for i, text := range message.Frames {
		if frames[i], err = hex.DecodeString(text); err != nil {
			return nil, fmt.Errorf("frame %d: %w", i, err)
		}
	}
	return frames, nil
}
