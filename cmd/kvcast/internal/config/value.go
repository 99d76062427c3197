package config

import (
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/core/index/hybrid"
	"github.com/kvcast/kvcast/internal/core/index/hybrid/vllmhash"
	"github.com/kvcast/kvcast/internal/discovery/kubernetes"
	"github.com/kvcast/kvcast/internal/feed"
)

// value is a scalar of the configuration, read and written as text. Reading the written text restores the value.
type value struct {
	want    string            // describes the allowed texts
	initial string            // the default; empty if there is none
	set     func(string) bool // parses and stores a text; reports false and stores nothing if the text is not allowed
	text    func() string     // the stored value as text; empty if no value is stored
	// namesSection reports whether the flag and the variable have the name of the value's section.
	namesSection bool
}

func newValue[T any](to *T, initial T, want string, parse func(string) (T, bool), format func(T) string) *value {
	return &value{
		want: want, initial: format(initial),
		set: func(text string) bool {
			v, ok := parse(text)
			if ok {
				*to = v
			}
			return ok
		},
		text: func() string { return format(*to) },
	}
}

func text[T ~string](to *T, initial T, allowed func(string) bool, want string) *value {
	return newValue(to, initial, want, func(s string) (T, bool) { return T(s), allowed(s) }, func(v T) string { return string(v) })
}

// oneOf is one of several words, with the first word as the default.
func oneOf[T ~string](to *T, among ...T) *value {
	words := make([]string, len(among))
	for i, a := range among {
		words[i] = string(a)
	}
	return text(to, among[0], func(s string) bool { return slices.Contains(words, s) }, either(words))
}

// zmq is an implementation of ZeroMQ that is in this build.
func zmq(to *ingestconfig.ZMQ, initial ingestconfig.ZMQ) *value {
	allowed := func(s string) bool { return ingestconfig.ZMQ(s).Available() }
	return text(to, initial, allowed, ingestconfig.AllowedZMQ())
}

// either returns words as alternatives, such as "a, b or c".
func either(words []string) string {
	if last := len(words) - 1; last > 0 {
		return strings.Join(words[:last], ", ") + " or " + words[last]
	}
	return strings.Join(words, "")
}

func boolean(to *bool, initial bool) *value {
	parse := func(s string) (bool, bool) { return s == "true", s == "true" || s == "false" }
	return newValue(to, initial, "true or false", parse, strconv.FormatBool)
}

// number is an integer from 1. If 0 is stored, no value is.
func number[T int | uint32](to *T, initial, most T) *value {
	parse := func(s string) (T, bool) {
		n, err := strconv.ParseInt(s, 10, 64)
		return T(n), err == nil && n >= 1 && n <= int64(most)
	}
	format := func(n T) string {
		if n == 0 {
			return ""
		}
		return strconv.FormatInt(int64(n), 10)
	}
	return newValue(to, initial, fmt.Sprintf("1 to %d", most), parse, format)
}

// rank is a dp rank. If 0 is stored, no value is.
func rank(to *int) *value {
	parse := func(s string) (int, bool) {
		n, err := strconv.ParseUint(s, 10, 16)
		return int(n), err == nil && n < feed.MaxRanks
	}
	format := func(n int) string {
		if n == 0 {
			return ""
		}
		return strconv.Itoa(n)
	}
	return newValue(to, 0, fmt.Sprintf("0 to %d", feed.MaxRanks-1), parse, format)
}

// ratio is a number from 0 to 1.
func ratio(to *float64, initial float64) *value {
	parse := func(s string) (float64, bool) {
		f, err := strconv.ParseFloat(s, 64)
		return f, err == nil && f >= 0 && f <= 1
	}
	return newValue(to, initial, "0 to 1, such as 0.01", parse, func(f float64) string { return strconv.FormatFloat(f, 'g', -1, 64) })
}

// replayPort is a port. The text 0 is stored as the number none.
func replayPort(to *int, initial, none int) *value {
	parse := func(s string) (int, bool) {
		n, err := strconv.ParseUint(s, 10, 16)
		if n == 0 {
			return none, err == nil
		}
		return int(n), err == nil
	}
	return newValue(to, initial, "1 to 65535, or 0 for none", parse, func(n int) string { return strconv.Itoa(max(n, 0)) })
}

// duration is a duration in the syntax of time.ParseDuration, such as 1h30m.
func duration(to *time.Duration, initial, least, most time.Duration) *value {
	return zeroDuration(to, initial, least, most, 0, "")
}

// zeroDuration is a duration. The text 0s is stored as zero; meaning is its effect, if 0s is not an ordinary duration.
func zeroDuration(to *time.Duration, initial, least, most, zero time.Duration, meaning string) *value {
	parse := func(s string) (time.Duration, bool) {
		d, err := time.ParseDuration(s)
		if d == 0 && (meaning != "" || least == 0) {
			return zero, err == nil
		}
		return d, err == nil && d >= least && d <= most
	}
	format := func(d time.Duration) string {
		if d == zero {
			d = 0
		}
		return durationText(d)
	}
	want := durationText(least) + " to " + durationText(most)
	if most == math.MaxInt64 {
		want = durationText(least) + " or more, such as 30s"
	}
	if meaning != "" {
		want = "0s " + meaning + ", or " + want
	}
	return newValue(to, initial, want, parse, format)
}

// durationText returns 1h for 1h0m0s, and 1m for 1m0s.
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

type byteUnit struct {
	suffix string
	bytes  int64
}

var byteUnits = []byteUnit{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}, {"", 1}}

// size is a number of bytes, such as 64MiB.
func size[T int | int64](to *T, initial, least, most T) *value {
	parse := func(s string) (T, bool) {
		for _, unit := range byteUnits {
			digits, ok := strings.CutSuffix(s, unit.suffix)
			if !ok {
				continue
			}
			n, err := strconv.ParseUint(digits, 10, 63)
			ok = err == nil && n <= uint64(int64(most)/unit.bytes) && int64(n)*unit.bytes >= int64(least)
			return T(int64(n) * unit.bytes), ok
		}
		return 0, false
	}
	want := sizeText(least) + " to " + sizeText(most) + ", such as " + sizeText(initial)
	return newValue(to, initial, want, parse, sizeText)
}

// sizeText writes bytes in the largest unit that divides them.
func sizeText[T int | int64](b T) string {
	unit := byteUnits[slices.IndexFunc(byteUnits, func(u byteUnit) bool { return int64(b)%u.bytes == 0 })]
	return strconv.FormatInt(int64(b)/unit.bytes, 10) + unit.suffix
}

func logLevel(to *slog.Level) *value {
	levels := map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError}
	parse := func(s string) (slog.Level, bool) { l, ok := levels[s]; return l, ok }
	return newValue(to, slog.LevelInfo, "debug, info, warn or error", parse, func(l slog.Level) string { return strings.ToLower(l.String()) })
}

// engine is the name or an alias of an engine.
func engine(to *feed.Engine) *value {
	return newValue(to, feed.EngineVLLM, ingestconfig.AllowedEngines, ingestconfig.ParseEngine, func(e feed.Engine) string { return string(e) })
}

// discoveredEngine is an engine without a default, since a pod or an endpoint may name it.
func discoveredEngine(to *feed.Engine) *value {
	v := engine(to)
	v.initial = ""
	return v
}

func namespace(to *string) *value {
	return text(to, "", kubernetes.ValidNamespace, "the name of a namespace, or "+kubernetes.AllNamespaces+" for all")
}

func poolName(to *string) *value {
	return text(to, "", ingestconfig.ValidName, ingestconfig.AllowedName)
}

func podLabel(to *string) *value {
	return text(to, "", kubernetes.ValidLabel, "the key of a label, such as llm-d.ai/role")
}

func clears(to *ingestconfig.Clears) *value {
	return oneOf(to, ingestconfig.ClearsAuto, ingestconfig.ClearsDevice, ingestconfig.ClearsAll)
}

func copies(to *ingestconfig.Copies) *value {
	return oneOf(to, ingestconfig.CopiesAuto, ingestconfig.CopiesCounted, ingestconfig.CopiesAnnouncedLast)
}

// hosts is a list of hosts separated by commas, stored as text and parsed.
func hosts(to *string, parsed *ingestconfig.Hosts) *value {
	parse := func(s string) bool {
		var list []string
		if s != "" {
			list = strings.Split(s, ",")
		}
		h, err := ingestconfig.ParseHosts(list)
		if err == nil {
			*parsed = h
		}
		return err == nil
	}
	return text(to, "", parse, "hosts separated by commas, each an IP address, a CIDR such as 10.0.0.0/8, a name, or *.DOMAIN; empty for any")
}

func fileName(to *string, allowed func(string) bool) *value {
	return text(to, "", allowed, "a file's name in UTF-8 without control or format characters")
}

// word is a text that package ingest validates.
func word(to *string) *value {
	return text(to, "", func(string) bool { return true }, "a text")
}

// eagleGroups are indexes of attention groups: all, or numbers joined by +. Empty is none.
func eagleGroups(to *uint64) *value {
	parse := func(s string) (groups uint64, ok bool) {
		if s == "all" {
			return math.MaxUint64, true
		}
		for number := range strings.SplitSeq(s, "+") {
			n, err := strconv.ParseUint(number, 10, 32)
			if err != nil || n >= hybrid.MaxGroups {
				return 0, s == ""
			}
			groups |= 1 << n
		}
		return groups, true
	}
	format := func(groups uint64) string {
		if groups == math.MaxUint64 {
			return "all"
		}
		var numbers []string
		for n := range hybrid.MaxGroups {
			if groups&(1<<n) != 0 {
				numbers = append(numbers, strconv.Itoa(n))
			}
		}
		return strings.Join(numbers, "+")
	}
	return newValue(to, 0, fmt.Sprintf("all, or numbers of attention groups from 0 to %d joined by +", hybrid.MaxGroups-1), parse, format)
}

// loraPaths are the paths of LoRA adapters: NAME:PATH, joined by +. Empty is none.
func loraPaths(to *map[string]string) *value {
	parse := func(s string) (paths map[string]string, ok bool) {
		if s == "" {
			return nil, true
		}
		paths = make(map[string]string)
		for pair := range strings.SplitSeq(s, "+") {
			name, path, ok := strings.Cut(pair, ":")
			if _, twice := paths[name]; !ok || twice || name == "" || path == "" || len(name) > vllmhash.MaxNameBytes || len(path) > vllmhash.MaxPathBytes ||
				!ingestconfig.Printable(pair) {
				return nil, false
			}
			paths[name] = path
		}
		return paths, true
	}
	format := func(paths map[string]string) string {
		var pairs []string
		for _, name := range slices.Sorted(maps.Keys(paths)) {
			pairs = append(pairs, name+":"+paths[name])
		}
		return strings.Join(pairs, "+")
	}
	return newValue(to, nil, "NAME:PATH of each LoRA adapter, joined by +", parse, format)
}

// isAddress reports whether s has the form of an address to listen on.
func isAddress(s string) bool {
	_, port, err := net.SplitHostPort(s)
	if err != nil || !ingestconfig.Printable(s) {
		return false
	}
	_, err = strconv.ParseUint(port, 10, 16)
	return err == nil
}

// isInstanceName reports whether a text names a server of a cluster.
func isInstanceName(s string) bool {
	return len(s) <= 64 && strings.IndexFunc(s, func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_' && c != '.'
	}) < 0
}

// isCollector reports whether s is the URL of a collector, or empty.
func isCollector(s string) bool {
	if s == "" {
		return true
	}
	u, err := url.Parse(s)
	return err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Hostname() != "" && isAddress(u.Host) && s == u.Scheme+"://"+u.Host
}
