package cli

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/output"
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

// ReportNoMatch writes a hint if no worker matches the filter. This is no error, since a worker may come later. Errors of
// the server are ignored: the caller's next call reports them.
func (f *Filter) ReportNoMatch(ctx context.Context, client kvcastv1.RouterEventServiceClient, out io.Writer) {
	if len(f.Worker)+len(f.Model) == 0 {
		return
	}
	matching, err := client.ListWorkers(ctx, &kvcastv1.ListWorkersRequest{Filter: &kvcastv1.Filter{Workers: f.Worker, Models: f.Model}})
	if err == nil && len(matching.GetWorkers()) == 0 {
		_ = f.WriteNoMatch(ctx, client, out)
	}
}

// maxListed is the number of workers that WriteNoMatch lists at most.
const maxListed = 8

// WriteNoMatch writes that no worker matches the filter, and lists the existing workers.
func (f *Filter) WriteNoMatch(ctx context.Context, client kvcastv1.RouterEventServiceClient, out io.Writer) error {
	all, err := client.ListWorkers(ctx, &kvcastv1.ListWorkersRequest{})
	if err != nil {
		return err
	}
	var names []string
	for i, w := range all.GetWorkers() {
		if i == maxListed {
			names = append(names, fmt.Sprintf("%d more", len(all.GetWorkers())-i))
			break
		}
		names = append(names, fmt.Sprintf("%s (model %q)", output.Printable(w.GetName()), w.GetModel()))
	}
	if names == nil {
		names = []string{"none"}
	}
	_, err = fmt.Fprintf(out, "no worker matches%s; workers: %s\n", f.FilterFlags(), strings.Join(names, ", "))
	return err
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
