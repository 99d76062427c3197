package output

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// JSON returns a message as compact JSON with proto field names. It removes white space, which protojson varies.
func JSON(m proto.Message) (json.RawMessage, error) {
	raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	var compact bytes.Buffer
	if err == nil {
		err = json.Compact(&compact, raw)
	}
	if err != nil {
		return nil, fmt.Errorf("write JSON: %w", err)
	}
	return compact.Bytes(), nil
}

// WriteJSON writes a message as a line of JSON.
func WriteJSON(out io.Writer, m proto.Message) error {
	raw, err := JSON(m)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s\n", raw)
	return err
}

// Plural returns a number with a noun, such as "2 workers".
func Plural(n int, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}

// Decimal returns a number without separators.
func Decimal(n uint64) string { return strconv.FormatUint(n, 10) }

// Grouped returns a number with commas.
func Grouped(n uint64) string {
	digits := Decimal(n)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}

// EnumName returns a value of an enum without its prefix, in lower case: live for WORKER_STATE_LIVE.
func EnumName(value fmt.Stringer, prefix string) string {
	return strings.ToLower(strings.TrimPrefix(value.String(), prefix))
}

// TierName returns the name of a tier as --tier accepts it.
func TierName(t kvcastv1.Tier) string { return EnumName(t, "TIER_") }
