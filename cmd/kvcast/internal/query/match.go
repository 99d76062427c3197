package query

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/output"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Match is kvcast match.
type Match struct {
	flags
	promptFlags
	Model  string           `placeholder:"NAME" help:"Only workers with this model. Default: all."`
	Worker []string         `placeholder:"NAME" help:"Only these workers. Repeatable."`
	Limit  uint32           `placeholder:"N" help:"Print the best N matches; 0, the default, prints all."`
	After  *client.Position `placeholder:"EPOCH:SEQ" help:"Wait up to a second until the server has applied this position; :SEQ means the server's current epoch."`
}

// Help implements kong.HelpProvider.
func (*Match) Help() string {
	return cli.Examples(
		"kvcast match --model Qwen/Qwen3-0.6B --tokens 9707,11,1879",
		"kvcast match --tokens-file prompt.json --limit 3",
		"python tokenize.py prompt.txt | kvcast match --tokens-file - -o json",
		"kvcast match --tokens-hashes 0x3dd5f12a7a2e9e25,4441800585355103191") + `
The longest prefix comes first. BLOCKS are the blocks of the prefix, each of which is held in some tier; DEVICE and OTHER TIERS are the blocks of the prefix in one tier, and the attention group that ends it, if the engine has several and one ends it before the prompt does. TRUST is exact; upper_bound (the engine has further attention groups, and may reuse less); or degraded, with the reasons why the blocks may differ from the engine's. POOLS are the tokens of the prefix in each pool from which the worker can load blocks, if a pool holds some.`
}

// Run prints a line for each dp rank that holds a prefix of the prompt, or the response as an object.
func (c *Match) Run(ctx context.Context, std cli.Process) error {
	prompt, err := c.prompt(std.In)
	if err != nil {
		return cli.UsageError{Err: err}
	}
	req := &kvcastv1.MatchPrefixRequest{Model: c.Model, Prompts: []*kvcastv1.Prompt{prompt}, Workers: c.Worker, Limit: c.Limit}
	if c.After != nil {
		req.After = c.After.Proto()
	}
	return c.call(std, func(server kvcastv1.RouterEventServiceClient) error {
		answer, err := server.MatchPrefix(ctx, req)
		if err == nil {
			err = c.checkExists(ctx, server, answer)
		}
		if err != nil {
			return err
		}
		if c.Output == "json" {
			return output.WriteJSON(std.Out, answer)
		}
		at := client.Position{Epoch: answer.GetPosition().GetEpoch(), Seq: answer.GetPosition().GetSeq()}
		_, _ = fmt.Fprintf(std.Err, "at position %s\n", at)
		if matches := answer.GetPrompts()[0].GetMatches(); len(matches) > 0 {
			return writeMatches(std.Out, matches)
		}
		return c.writeNoMatch(ctx, server, std.Out)
	})
}

// checkExists returns an error if a worker or the model does not exist. What the answer has needs no further call.
func (c *Match) checkExists(ctx context.Context, server kvcastv1.RouterEventServiceClient, answer *kvcastv1.MatchPrefixResponse) error {
	filter := c.filter()
	matches := answer.GetPrompts()[0].GetMatches()
	if len(matches) == 0 {
		return filter.CheckExists(ctx, server)
	}
	var seen cli.Seen
	for _, m := range matches {
		seen.Add(m.GetWorker(), c.Model)
	}
	return filter.CheckOthers(ctx, server, seen)
}

// filter returns the filter of the workers that may match.
func (c *Match) filter() cli.Filter {
	filter := cli.Filter{Worker: c.Worker}
	if c.Model != "" {
		filter.Model = []string{c.Model}
	}
	return filter
}

// writeNoMatch writes that no dp rank of the workers has a prefix of the prompt.
func (c *Match) writeNoMatch(ctx context.Context, server kvcastv1.RouterEventServiceClient, out io.Writer) error {
	filter := c.filter()
	selected, err := server.ListWorkers(ctx, &kvcastv1.ListWorkersRequest{Filter: filter.Proto()})
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "no dp rank of %s has the first block of the prompt\n", output.Plural(len(selected.GetWorkers()), "worker"))
	return err
}

// writeMatches writes a line for each match.
func writeMatches(out io.Writer, matches []*kvcastv1.PrefixMatch) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	pools := func(string) string { return "" }
	if slices.ContainsFunc(matches, func(m *kvcastv1.PrefixMatch) bool { return len(m.GetPools()) > 0 }) {
		pools = func(cell string) string { return cell + "\t" }
	}
	_, _ = fmt.Fprintln(t, "WORKER\tRANK\tENDPOINT\tBLOCKS\tTOKENS\tDEVICE\tOTHER TIERS\t"+pools("POOLS")+"TRUST")
	for _, m := range matches {
		device, others := "0", []string(nil)
		for _, tier := range m.GetTiers() {
			blocks := fmt.Sprint(tier.GetBlocks())
			if tier.EndedByGroup != nil {
				blocks += fmt.Sprintf(" (group %d)", tier.GetEndedByGroup())
			}
			if tier.GetTier() == kvcastv1.Tier_TIER_DEVICE {
				device = blocks
			} else {
				others = append(others, output.TierName(tier.GetTier())+" "+blocks)
			}
		}
		_, _ = fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%d\t%s\t%s\t%s%s\n",
			output.Printable(m.GetWorker()), m.GetDpRank(), output.Printable(cmp.Or(m.GetEndpoint(), "-")),
			blocksText(m), m.GetTokens(), device, cmp.Or(strings.Join(others, ", "), "-"), pools(poolsText(m)), trustText(m))
	}
	return t.Flush()
}

// blocksText returns a number of blocks, and how many are expected if that is more.
func blocksText(m *kvcastv1.PrefixMatch) string {
	if n := m.GetExpectedBlocks(); n > 0 {
		return fmt.Sprintf("%d (%d expected)", m.GetBlocks(), n)
	}
	return fmt.Sprint(m.GetBlocks())
}

// poolsText returns the tokens in pools, such as "lmcache-a 512 (degraded: connector_tier)".
func poolsText(m *kvcastv1.PrefixMatch) string {
	var all []string
	for _, p := range m.GetPools() {
		text := fmt.Sprintf("%s %d", output.Printable(p.GetPool()), p.GetTokens())
		if p.GetTrust() != kvcastv1.Trust_TRUST_EXACT {
			text += " (" + trustText(&kvcastv1.PrefixMatch{Trust: p.GetTrust(), Reasons: p.GetReasons()}) + ")"
		}
		all = append(all, text)
	}
	return cmp.Or(strings.Join(all, ", "), "-")
}

// trustText returns a trust such as "exact" or "degraded: gap, source_down 12s".
func trustText(m *kvcastv1.PrefixMatch) string {
	var reasons []string
	for _, r := range m.GetReasons() {
		reasons = append(reasons, output.ReasonName(r, m.GetDownNano(), m.GetAgeNano()))
	}
	text := output.EnumName(m.GetTrust(), "TRUST_")
	if reasons != nil {
		text += ": " + strings.Join(reasons, ", ")
	}
	for _, tier := range m.GetTiers() {
		if trust := tier.GetTrust(); trust != kvcastv1.Trust_TRUST_UNSPECIFIED && trust != m.GetTrust() {
			text += fmt.Sprintf("; %s %s", output.TierName(tier.GetTier()), output.EnumName(trust, "TRUST_"))
		}
	}
	return text
}
