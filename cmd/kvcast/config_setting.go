package main

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// setting is a scalar of the configuration: how its text is read, and written
// so that it reads as the same.
type setting struct {
	// key is its path in what it belongs to, such as journal.max_bytes.
	key string
	// want says what is allowed.
	want string
	// read keeps what the text says, or keeps nothing and returns false.
	read func(text string) bool
	// text is what is kept.
	text func() string
	// fixed tells that this version has built the default only.
	fixed bool
}

// flag and variable are the names of a setting on the command line and in the
// environment.
func (s setting) flag() string {
	return strings.NewReplacer(".", "-", "_", "-").Replace(s.key)
}

func (s setting) variable() string {
	return "KVCAST_" + strings.ToUpper(strings.ReplaceAll(s.key, ".", "_"))
}

// set keeps what the text says, or tells what is allowed instead.
func (s setting) set(text string) error {
	before := s.text()
	if s.fixed {
		s.want = before
	}
	if !s.read(text) {
		return notAllowed(text, s.want)
	}
	if s.fixed && s.text() != before {
		s.read(before)
		return fmt.Errorf("%q is not built in this version: want %s", text, before)
	}
	return nil
}

func notAllowed(value any, want string) error {
	if s, ok := value.(string); ok {
		value = strconv.Quote(s)
	}
	return fmt.Errorf("%v is not allowed: want %s", value, want)
}

// notBuilt is a setting of which only the default is built.
func notBuilt(s setting) setting {
	s.fixed = true
	return s
}

func text[T ~string](key string, to *T, allowed func(string) bool, want string) setting {
	return setting{key: key, want: want,
		read: func(text string) bool {
			if !allowed(text) {
				return false
			}
			*to = T(text)
			return true
		},
		text: func() string { return string(*to) },
	}
}

func anything(string) bool { return true }

func notEmpty(s string) bool { return s != "" }

func printable(s string) bool {
	return utf8.ValidString(s) && strings.IndexFunc(s, unicode.IsControl) < 0
}

func oneOf[T ~string](key string, to *T, among ...T) setting {
	names := make([]string, len(among))
	for i, a := range among {
		names[i] = string(a)
	}
	return text(key, to, func(s string) bool { return slices.Contains(names, s) }, either(names))
}

// either names all of several words, as one chooses among them.
func either(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

// count is a whole number. Where it is below what is allowed it has not been
// given, and has no text.
func count[T int | uint32](key string, to *T, least, most T) setting {
	return setting{key: key, want: fmt.Sprintf("%d to %d", least, most),
		read: func(text string) bool {
			n, err := strconv.ParseInt(text, 10, 64)
			if err != nil || n < int64(least) || n > int64(most) {
				return false
			}
			*to = T(n)
			return true
		},
		text: func() string {
			if *to < least {
				return ""
			}
			return strconv.FormatInt(int64(*to), 10)
		},
	}
}

func yesNo(key string, to *bool) setting {
	return setting{key: key, want: "true or false",
		read: func(text string) bool {
			if text != "true" && text != "false" {
				return false
			}
			*to = text == "true"
			return true
		},
		text: func() string { return strconv.FormatBool(*to) },
	}
}

// duration is written as Go writes it, such as 1h30m.
func duration(key string, to *time.Duration, least, most time.Duration) setting {
	want := durationText(least) + " to " + durationText(most)
	if most == math.MaxInt64 {
		want = durationText(least) + " or more, such as 30s"
	}
	return setting{key: key, want: want,
		read: func(text string) bool {
			d, err := time.ParseDuration(text)
			if err != nil || d < least || d > most {
				return false
			}
			*to = d
			return true
		},
		text: func() string { return durationText(*to) },
	}
}

// limit is a duration, or 0, which has a meaning of its own.
func limit(key string, to *time.Duration, least, most time.Duration, zero string) setting {
	s := duration(key, to, least, most)
	read := s.read
	s.want = "0s " + zero + ", or " + s.want
	s.read = func(text string) bool {
		if d, err := time.ParseDuration(text); err == nil && d == 0 {
			*to = 0
			return true
		}
		return read(text)
	}
	return s
}

// durationText leaves out the zeros that Go puts behind hours and minutes.
func durationText(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// byteSize is a number of bytes, written such as 64MiB.
type byteSize int64

// Bounds of what a journal may take.
const (
	leastBytes byteSize = 1 << 20
	mostBytes  byteSize = 1 << 40
)

var byteUnits = []struct {
	suffix string
	bytes  byteSize
}{
	{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}, {"", 1},
}

func size(key string, to *byteSize, least, most byteSize) setting {
	return setting{key: key, want: least.String() + " to " + most.String() + ", such as " + to.String(),
		read: func(text string) bool { return to.read(text, least, most) },
		text: to.String,
	}
}

func (b *byteSize) read(text string, least, most byteSize) bool {
	for _, unit := range byteUnits {
		digits, ok := strings.CutSuffix(text, unit.suffix)
		if !ok {
			continue
		}
		n, err := strconv.ParseUint(digits, 10, 63)
		if err != nil || n > uint64(most/unit.bytes) || byteSize(n)*unit.bytes < least {
			return false
		}
		*b = byteSize(n) * unit.bytes
		return true
	}
	return false
}

// String returns the bytes in the largest unit that divides them.
func (b byteSize) String() string {
	for _, unit := range byteUnits {
		if b%unit.bytes == 0 {
			return strconv.FormatInt(int64(b/unit.bytes), 10) + unit.suffix
		}
	}
	return "" // never reached: each is whole in bytes
}
