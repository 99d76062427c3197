package output

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// JSON returns a message as JSON with proto field names. protojson varies the white space, which json.Marshal removes.
func JSON(m proto.Message) (json.RawMessage, error) {
	return protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
}

// WriteJSON writes a message as a line of compact JSON.
func WriteJSON(out io.Writer, m proto.Message) error {
	raw, err := JSON(m)
	if err != nil {
		return err
	}
	line := json.NewEncoder(EscapedJSON(out))
	line.SetEscapeHTML(false)
	return line.Encode(raw)
}

// EscapedJSON returns a writer of lines of JSON, each by one Write. It escapes characters in strings that a terminal would obey or not show:
// engines choose names. To a reader of JSON, the text is the same.
func EscapedJSON(out io.Writer) io.Writer { return jsonLines{out} }

type jsonLines struct{ out io.Writer }

// Write implements io.Writer.
func (l jsonLines) Write(line []byte) (int, error) {
	const del = 0x7f
	if !bytes.ContainsFunc(line, func(r rune) bool { return r >= del }) {
		return l.out.Write(line)
	}
	escaped := make([]byte, 0, 2*len(line))
	for _, r := range string(line) {
		if r < del || unicode.IsPrint(r) {
			escaped = utf8.AppendRune(escaped, r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			escaped = fmt.Appendf(escaped, `\u%04x`, unit)
		}
	}
	if _, err := l.out.Write(escaped); err != nil {
		return 0, err
	}
	return len(line), nil
}

// Plural returns a number with a noun, such as "2 workers".
func Plural(n int, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}

// Grouped returns a number with commas.
func Grouped(n uint64) string {
	digits := strconv.FormatUint(n, 10)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}

// EnumName returns a value of an enum without its prefix, in lower case: live for WORKER_STATE_LIVE.
func EnumName(value fmt.Stringer, prefix string) string {
	return strings.ToLower(strings.TrimPrefix(value.String(), prefix))
}

// WorkerState returns the name of a worker's state.
func WorkerState(s kvcastv1.WorkerState) string {
	if s == kvcastv1.WorkerState_WORKER_STATE_UNSPECIFIED {
		return "unknown"
	}
	return EnumName(s, "WORKER_STATE_")
}

// TierName returns the name of a tier as --tier accepts it.
func TierName(t kvcastv1.Tier) string { return EnumName(t, "TIER_") }
