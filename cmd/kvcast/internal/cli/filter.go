package cli

import (
	"fmt"
	"strings"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Filter contains the flags that select workers, models and tiers.
type Filter struct {
	Worker []string `placeholder:"NAME" help:"Only these workers. Repeatable."`
	Model  []string `placeholder:"NAME" help:"Only workers with these models. Repeatable."`
	Tier   []string `placeholder:"TIER" enum:"device,host_pinned,disk,external" help:"Only blocks in these tiers: device, host_pinned, disk, external. Repeatable."`
}

// Proto returns the filter of a request; nil without flags.
func (f *Filter) Proto() *kvcastv1.Filter {
	if len(f.Worker)+len(f.Model)+len(f.Tier) == 0 {
		return nil
	}
	out := &kvcastv1.Filter{Workers: f.Worker, Models: f.Model}
	for _, name := range f.Tier {
		out.Tiers = append(out.Tiers, kvcastv1.Tier(kvcastv1.Tier_value["TIER_"+strings.ToUpper(name)]))
	}
	return out
}

// FilterFlags returns the flags as on a command line, each after a space.
func (f *Filter) FilterFlags() string {
	var b strings.Builder
	for _, list := range []struct {
		flag   string
		values []string
	}{{"--worker", f.Worker}, {"--model", f.Model}, {"--tier", f.Tier}} {
		for _, v := range list.values {
			fmt.Fprintf(&b, " %s %s", list.flag, ShellWord(v))
		}
	}
	return b.String()
}

// ShellWord quotes a word for a shell, if necessary.
func ShellWord(word string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_./:@%+,=", r)
	}
	if word != "" && !strings.ContainsFunc(word, func(r rune) bool { return !plain(r) }) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}
