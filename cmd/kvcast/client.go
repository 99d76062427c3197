package main

import (
	"fmt"
	"strconv"
	"strings"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// clientFlags are those of every command that asks a server.
type clientFlags struct {
	connectionFlags
	Output string `short:"o" enum:"text,json" default:"text" placeholder:"FORMAT" help:"text for people, json for programs: an object a line (${default})."`
}

// call calls the server, by a connection of its own.
func (c *clientFlags) call(f func(kvcastv1.RouterEventServiceClient) error) error {
	conn, err := c.dial()
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if err := f(kvcastv1.NewRouterEventServiceClient(conn)); err != nil {
		return c.callError(err)
	}
	return nil
}

// filterFlags narrow a stream.
type filterFlags struct {
	Worker []string `placeholder:"NAME" help:"Only these workers. Repeatable."`
	Model  []string `placeholder:"NAME" help:"Only workers of these models. Repeatable."`
	Tier   []string `placeholder:"TIER" predictor:"tier" help:"Only blocks in these tiers: device, host_pinned, disk, external. Repeatable."`
}

// filter returns nil where nothing is to be left out.
func (f *filterFlags) filter() (*kvcastv1.Filter, error) {
	if len(f.Worker)+len(f.Model)+len(f.Tier) == 0 {
		return nil, nil
	}
	out := &kvcastv1.Filter{Workers: f.Worker, Models: f.Model}
	for _, name := range f.Tier {
		tier := kvcastv1.Tier_value["TIER_"+strings.ToUpper(name)]
		if tier == 0 {
			return nil, fmt.Errorf("--tier: %q is not allowed: want device, host_pinned, disk or external", name)
		}
		out.Tiers = append(out.Tiers, kvcastv1.Tier(tier))
	}
	return out, nil
}

// flags writes the flags as they would be given again.
func (f *filterFlags) flags(c clientFlags) string {
	var b strings.Builder
	b.WriteString(c.callFlags())
	if c.Output != "text" {
		fmt.Fprintf(&b, " -o %s", c.Output)
	}
	b.WriteString(f.text())
	return b.String()
}

// text writes the flags of the filter alone.
func (f *filterFlags) text() string {
	var b strings.Builder
	for _, list := range []struct {
		flag   string
		values []string
	}{{"--worker", f.Worker}, {"--model", f.Model}, {"--tier", f.Tier}} {
		for _, v := range list.values {
			fmt.Fprintf(&b, " %s %s", list.flag, shellWord(v))
		}
	}
	return b.String()
}

// shellWord writes a word so that a shell reads it as that word.
func shellWord(word string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_./:@%+,=", r)
	}
	if word != "" && !strings.ContainsFunc(word, func(r rune) bool { return !plain(r) }) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// position is a Position as people write it.
type position struct {
	set   bool
	epoch string
	seq   uint64
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *position) UnmarshalText(text []byte) error {
	epoch, digits, ok := strings.Cut(string(text), ":")
	seq, err := strconv.ParseUint(digits, 10, 64)
	if !ok || err != nil {
		return fmt.Errorf("%q is not allowed: want EPOCH:SEQ, or :SEQ for the server's current epoch, such as :42", text)
	}
	*p = position{set: true, epoch: epoch, seq: seq}
	return nil
}

func (p position) String() string { return fmt.Sprintf("%s:%d", p.epoch, p.seq) }

// proto returns nil for a position that is not set.
func (p position) proto() *kvcastv1.Position {
	if !p.set {
		return nil
	}
	return &kvcastv1.Position{Epoch: p.epoch, Seq: p.seq}
}
