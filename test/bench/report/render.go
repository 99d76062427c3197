package main

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// quantity is a figure, and how it is written.
type quantity struct {
	name, unit string
	factor     float64 // of the figure
	as         string  // the unit that is written; empty for ratios
}

// row is a line of a table: what was measured, and what that was compared with in the same rounds.
type row struct {
	what   string
	values []quantity
	// beside and besides are the last column: a text, and the values after it.
	beside  string
	besides []quantity
	readme  bool // whether the README has it
}

// callsOfMatch is 1 by the number of matches in an operation of BenchmarkMatch of the radix index.
const callsOfMatch = 1.0 / 256

var rows = []row{
	{
		"CPU time of an engine's batch that stores one block of 16 tokens, from ZeroMQ to 8 subscribers, server on one core",
		[]quantity{{"ServerToRelay/B2", "server-cpu-ns/batch", 1e-3, "µs"}}, "a bare relay without state, by which it is divided: ",
		[]quantity{{"ServerToRelay/B2", "server/relay", 1, ""}}, true,
	},
	{
		"CPU time of a batch that stores 16 blocks", []quantity{{"ServerToRelay/B1", "server-cpu-ns/batch", 1e-3, "µs"}}, "the same: ",
		[]quantity{{"ServerToRelay/B1", "server/relay", 1, ""}}, true,
	},
	{
		"CPU time of a batch that stores 16 blocks, with a journal in files", []quantity{{"Server/B1FileOneCore", "server-cpu-ns/batch", 1e-3, "µs"}}, "in memory: ",
		[]quantity{{"Server/B1OneCore", "server-cpu-ns/batch", 1e-3, "µs"}}, true,
	},
	{
		"CPU time of an entry of one block for each of 64 subscribers that are behind", []quantity{{"Delivery/B2/64", "server-cpu-ns/delivery", 1, "ns"}}, "writing its bytes: ",
		[]quantity{{"FloorFanout/B2/64", "cpu-ns/delivery", 1, "ns"}}, true,
	},
	{
		"CPU time of an entry of 16 blocks for each of 64 subscribers that are behind", []quantity{{"Delivery/B1/64", "server-cpu-ns/delivery", 1, "ns"}}, "writing its bytes: ",
		[]quantity{{"FloorFanout/B1/64", "cpu-ns/delivery", 1, "ns"}}, true,
	},
	{
		"latency from engine to subscriber at 2,000 batches a second, p50 and p99",
		[]quantity{{"Latency/B2/native", "p50-us", 1, "µs"}, {"Latency/B2/native", "p99-us", 1, "µs"}}, "a loop in C: ",
		[]quantity{{"Latency/B2/native", "floor-p50-us", 1, "µs"}, {"Latency/B2/native", "floor-p99-us", 1, "µs"}}, true,
	},
	{"a match of 1,000 blocks that 64 workers hold, in process", []quantity{{"Match/1000Whole", "ns/op", callsOfMatch, "ns"}}, "", nil, true},
	{"a match of 32 blocks that 64 workers hold, in process", []quantity{{"Match/32Whole", "ns/op", callsOfMatch, "ns"}}, "", nil, true},
	{"a match of the best 8 of 64 workers, with their names, tiers and trust", []quantity{{"MatchBest", "ns/op", 1, "ns"}}, "", nil, false},
	{
		"matches of 32 blocks that 64 workers hold, the best 8, by a server on one core: one a call", []quantity{{"MatchPrefixCost", "prompts/s/core", 1, "/s"}}, "", nil, true,
	},
	{
		"the same over a stream, one a message, one in flight and eight",
		[]quantity{{"MatchPrefixes/1PromptBest8OneInFlight", "prompts/s/core", 1, "/s"}, {"MatchPrefixes/1PromptBest8", "prompts/s/core", 1, "/s"}}, "", nil, true,
	},
	{"the same, 64 a message", []quantity{{"MatchPrefixes/64PromptsBest8", "prompts/s/core", 1, "/s"}}, "all 64 workers: ", []quantity{{"MatchPrefixes/64PromptsAll", "prompts/s/core", 1, "/s"}}, false},
	{
		"a call of MatchPrefix beside 5,000 batches a second, p50 and p99",
		[]quantity{{"MatchPrefix/While5000Batches", "p50-us", 1, "µs"}, {"MatchPrefix/While5000Batches", "p99-us", 1, "µs"}}, "a health check: ",
		[]quantity{{"MatchPrefix/While5000Batches", "floor-p50-us", 1, "µs"}, {"MatchPrefix/While5000Batches", "floor-p99-us", 1, "µs"}}, true,
	},
	{"CPU time of a snapshot, a block of 1,000,000", []quantity{{"Snapshot/Quiet", "server-cpu-ns/block", 1, "ns"}}, "", nil, true},
	{"CPU time of a snapshot for each of 50 clients that come at once", []quantity{{"Herd/clients=50", "server-cpu-ms/client", 1, "ms"}}, "", nil, false},
	{"entries of one block that a subscriber catches up with", []quantity{{"CatchUp/B2", "entries/s", 1, "/s"}}, "", nil, true},
	{
		"memory of a block, in the pipeline and in the index",
		[]quantity{{"TableMemory/blocks=1000000", "B/block", 1, "B"}, {"Conversations/Fill", "bytes/block", 1, "B"}}, "", nil, true,
	},
}

// curve is how a cost grows: the figures of a family of benchmarks, whose names end with =N.
type curve struct {
	title, axis, family string
	quantity            quantity
	image               string // in docs/images
}

var curves = []curve{
	{"CPU time of a batch of one block by the number of engines, at 2,000 batches a second of all together", "engines", "Growth/engines", quantity{"", "server-cpu-ns/batch", 1e-3, "µs"}, "scale-engines.svg"},
	{"CPU time of a batch of 16 blocks by the number of blocks that are there", "blocks", "Growth/blocks", quantity{"", "server-cpu-ns/batch", 1e-3, "µs"}, "scale-blocks.svg"},
	{"resident memory of the server by the number of blocks", "blocks", "Growth/blocks", quantity{"", "B/block", 1, "B a block"}, "scale-memory.svg"},
	{"CPU time of an entry of 16 blocks for a subscriber by the number of subscribers", "subscribers", "Growth/subscribers", quantity{"", "server-cpu-ns/delivery", 1, "ns"}, "scale-subscribers.svg"},
	{"a match of 32 blocks by the number of workers that hold them, the best 8", "workers", "MatchGrowth/best8/workers", quantity{"", "ns/op", 1, "ns"}, "scale-workers-best.svg"},
	{"a match of 32 blocks by the number of workers that hold them, all workers", "workers", "MatchGrowth/all/workers", quantity{"", "ns/op", 1e-3, "µs"}, "scale-workers-all.svg"},
	{"a match by the number of blocks that 64 workers hold, the best 8", "blocks of the prompt", "MatchGrowth/best8/blocks", quantity{"", "ns/op", 1, "ns"}, "scale-prompt.svg"},
}

// writeDocuments writes the stored figures into README.md and docs/performance.md, and draws the plots in docs/images.
func writeDocuments(root string) error {
	files, err := documents(root)
	if err != nil {
		return err
	}
	for path, text := range files {
		if err := os.WriteFile(filepath.Join(root, path), []byte(text), 0o644); err != nil {
			return fmt.Errorf("write figures: %w", err)
		}
	}
	return nil
}

// documents returns the files that have figures, as they should be.
func documents(root string) (map[string]string, error) {
	files := make(map[string]string)
	report, err := readResults(root, suites[0])
	if err != nil {
		return nil, err
	}
	scale, err := readResults(root, suites[1])
	if err != nil {
		return nil, err
	}
	for _, d := range []struct {
		path, section string
		text          func() (string, error)
	}{
		{"README.md", "report", func() (string, error) { return report.table(true) }},
		{"docs/performance.md", "report", func() (string, error) { return report.table(false) }},
		{"docs/performance.md", "scale", func() (string, error) { return scale.growth(files) }},
	} {
		text, err := d.text()
		if err != nil {
			return nil, err
		}
		if files[d.path] == "" {
			b, err := os.ReadFile(filepath.Join(root, d.path))
			if err != nil {
				return nil, fmt.Errorf("read document: %w", err)
			}
			files[d.path] = string(b)
		}
		if files[d.path], err = replaceSection(files[d.path], d.section, text); err != nil {
			return nil, fmt.Errorf("%s: %w", d.path, err)
		}
	}
	return files, nil
}

// replaceSection replaces what is between the two comments that mark a section.
func replaceSection(document, name, text string) (string, error) {
	begin, end := fmt.Sprintf("<!-- figures of make bench-%s -->\n", name), fmt.Sprintf("<!-- end of figures of make bench-%s -->\n", name)
	before, rest, ok := strings.Cut(document, begin)
	_, after, ended := strings.Cut(rest, end)
	if !ok || !ended {
		return "", fmt.Errorf("the section is missing: want the lines %q and %q", strings.TrimSpace(begin), strings.TrimSpace(end))
	}
	return before + begin + "\n" + text + "\n" + end + after, nil
}

// where says what the figures are of.
func (r results) where() string {
	m := r.Machine
	return fmt.Sprintf("Medians of %d rounds, with the least and the largest in brackets; %s, commit `%s`; %s, %d CPUs, %d GiB, %s; %s, grpc-go %s, libzmq %s; load before %s, after %s.",
		r.Rounds, r.Date, r.Commit, m.CPU, m.Cores, m.MemoryGiB, m.System, m.Go, m.GRPC, m.ZeroMQ, m.LoadBefore, m.LoadAfter)
}

// table returns the rows of the README, or all.
func (r results) table(readme bool) (string, error) {
	var b strings.Builder
	b.WriteString("| | | beside it, in the same rounds |\n|---|---|---|\n")
	for _, row := range rows {
		if readme && !row.readme {
			continue
		}
		values, err := r.text(row.values)
		if err != nil {
			return "", err
		}
		besides, err := r.text(row.besides)
		if err != nil {
			return "", err
		}
		_, _ = fmt.Fprintf(&b, "| %s | %s | %s%s |\n", row.what, values, row.beside, besides)
	}
	return b.String() + "\n" + r.where() + "\n", nil
}

func (r results) text(quantities []quantity) (string, error) {
	var all []string
	for _, q := range quantities {
		f, ok := r.Figures[q.name][q.unit]
		if !ok {
			return "", fmt.Errorf("the stored figures have no %s of %s: measure again", q.unit, q.name)
		}
		all = append(all, q.text(f))
	}
	return strings.Join(all, "; "), nil
}

// text returns a figure as it is written, such as "4.1 µs (3.9 to 4.4)".
func (q quantity) text(f figure) string {
	unit := q.as
	if unit != "" && !strings.HasPrefix(unit, "/") {
		unit = " " + unit
	}
	return fmt.Sprintf("%s%s (%s to %s)", number(f.Median*q.factor), unit, number(f.Min*q.factor), number(f.Max*q.factor))
}

// number writes a number with three digits, or all digits before the point.
func number(v float64) string {
	if v == 0 {
		return "0"
	}
	return withDigits(v, max(0, 2-int(math.Floor(math.Log10(math.Abs(v))))))
}

// whole writes a whole number.
func whole(v float64) string { return withDigits(v, 0) }

// withDigits writes a number with some digits after the point.
func withDigits(v float64, digits int) string {
	text, fraction, _ := strings.Cut(strconv.FormatFloat(v, 'f', digits, 64), ".")
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	if fraction != "" {
		return text + "." + fraction
	}
	return text
}

// growth returns the tables of the curves, and adds their plots to files.
func (r results) growth(files map[string]string) (string, error) {
	var b strings.Builder
	var errs []error
	for _, c := range curves {
		points := r.points(c)
		if len(points) < 2 {
			errs = append(errs, fmt.Errorf("the stored figures have %d of %s: want 2 or more", len(points), c.family))
			continue
		}
		files["docs/images/"+c.image] = c.plot(points)
		_, _ = fmt.Fprintf(&b, "![%s](images/%s)\n\n| %s |", c.title, c.image, c.axis)
		for _, p := range points {
			_, _ = fmt.Fprintf(&b, " %s |", whole(p.x))
		}
		b.WriteString("\n|---|" + strings.Repeat("---|", len(points)) + "\n| " + c.quantity.as + " |")
		for _, p := range points {
			_, _ = fmt.Fprintf(&b, " %s (%s to %s) |", number(p.y), number(p.min), number(p.max))
		}
		b.WriteString("\n\n")
	}
	return b.String() + r.where() + "\n", errors.Join(errs...)
}
