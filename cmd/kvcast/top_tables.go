package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"charm.land/lipgloss/v2"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// topOrder is what workers are sorted by.
type topOrder int

const (
	topByName topOrder = iota
	topByRate
	topByBlocks
	topByGaps
	topOrders
)

func (o topOrder) String() string { return [...]string{"name", "batches", "blocks", "gaps"}[o] }

// topCell is a field of a table. Numbers stand to the right.
type topCell struct {
	text  string
	style lipgloss.Style
	right bool
}

func topText(text string) topCell             { return topCell{text: visible(text)} }
func topNumber(n uint64) topCell              { return topCell{text: grouped(n), right: true} }
func topRate(perSecond float64) topCell       { return topCell{text: rate(perSecond), right: true} }
func (c topCell) as(s lipgloss.Style) topCell { c.style = s; return c }

// table aligns rows, the first of which is the heading.
func (s topScreen) table(rows [][]topCell) []string {
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, c := range row {
			widths[i] = max(widths[i], lipgloss.Width(c.text))
		}
	}
	lines := make([]string, len(rows))
	for n, row := range rows {
		var b strings.Builder
		for i, c := range row {
			pad := strings.Repeat(" ", widths[i]-lipgloss.Width(c.text))
			text := s.as(c.style, c.text)
			if c.right {
				text = pad + text
			} else if i < len(row)-1 {
				text += pad
			}
			if i > 0 {
				b.WriteString("  ")
			}
			b.WriteString(text)
		}
		lines[n] = s.cut(b.String())
	}
	return lines
}

// cut leaves out what is beyond the screen.
func (s topScreen) cut(line string) string {
	if s.width == 0 {
		return line
	}
	return lipgloss.NewStyle().Inline(true).MaxWidth(s.width).Render(line)
}

// summary is the server as a whole, in two lines.
func (s topScreen) summary() []string {
	now := s.now.status
	entries := 0.0
	if s.before != nil {
		entries = s.perSecond(now.GetNewestSeq() - s.before.status.GetNewestSeq())
	}
	states := make(map[kvcastv1.WorkerState]int)
	for _, w := range s.now.workers {
		states[w.GetState()]++
	}
	var told []string
	for _, state := range []kvcastv1.WorkerState{
		kvcastv1.WorkerState_WORKER_STATE_LIVE, kvcastv1.WorkerState_WORKER_STATE_CONNECTING,
		kvcastv1.WorkerState_WORKER_STATE_DEGRADED, kvcastv1.WorkerState_WORKER_STATE_DISCONNECTED,
	} {
		if n := states[state]; n > 0 {
			told = append(told, s.as(workerStyle(state), fmt.Sprintf("%d %s", n, lower(state.String(), "WORKER_STATE_"))))
		}
	}
	workers := plural(len(s.now.workers), "worker")
	if len(told) > 0 {
		workers += " (" + strings.Join(told, ", ") + ")"
	}
	retained := uint64(0)
	if now.GetNewestSeq() >= now.GetOldestSeq() {
		retained = now.GetNewestSeq() - now.GetOldestSeq() + 1
	}
	return []string{
		s.cut(fmt.Sprintf("%s · %s %s · seq %s, %s/s · retains %s, %.1f MiB · epoch %s",
			s.now.at.Format(time.TimeOnly), s.as(strong, s.addr), now.GetVersion(), grouped(now.GetNewestSeq()), rate(entries),
			grouped(retained), float64(now.GetJournalBytes())/(1<<20), now.GetEpoch())),
		s.cut(fmt.Sprintf("%s · %s blocks · %s", workers, grouped(now.GetBlocks()), plural(len(s.now.subscribers), "subscriber"))),
	}
}

// topTiers are the columns of blocks.
var topTiers = []kvcastv1.Tier{
	kvcastv1.Tier_TIER_DEVICE, kvcastv1.Tier_TIER_HOST_PINNED, kvcastv1.Tier_TIER_DISK, kvcastv1.Tier_TIER_EXTERNAL,
}

// topRank is a line about a dp rank of a worker.
type topRank struct {
	worker *kvcastv1.WorkerStatus
	rank   *kvcastv1.RankStatus
	source string
	rate   float64
	blocks [5]uint64 // by tier
	all    uint64
}

// workers is the table of workers, a row for each dp rank.
func (s topScreen) workers() [][]topCell {
	head := []topCell{topText("WORKER"), topText("MODEL"), topText("STATE"), topText("RANK"), topText("SOURCE"), topText("BATCHES/S")}
	head[3].right, head[5].right = true, true
	ranks := s.ranks()
	var tiers []kvcastv1.Tier // the device, and those that are used
	for _, t := range topTiers {
		used := func(r topRank) bool { return r.blocks[t] > 0 }
		if t == kvcastv1.Tier_TIER_DEVICE || slices.ContainsFunc(ranks, used) {
			tiers = append(tiers, t)
			head = append(head, topCell{text: strings.ToUpper(tierName(t)), right: true})
		}
	}
	head = append(head, topText("GAPS"))
	for i := range head {
		head[i].style = faint
	}
	rows := [][]topCell{head}
	for _, r := range ranks {
		state := r.worker.GetState()
		sources := topText(r.source)
		if r.source != "live" && r.source != "-" {
			sources = sources.as(change)
		}
		row := []topCell{
			topText(r.worker.GetName()).as(strong), topText(cmp.Or(r.worker.GetModel(), "-")),
			topText(lower(state.String(), "WORKER_STATE_")).as(workerStyle(state)),
			topNumber(uint64(r.rank.GetDpRank())), sources, topRate(r.rate),
		}
		for _, t := range tiers {
			row = append(row, topNumber(r.blocks[t]))
		}
		missed := topText(gaps(r.rank))
		if r.rank.GetIncomplete() {
			missed = missed.as(bad)
		}
		rows = append(rows, append(row, missed))
	}
	return rows
}

// ranks are the lines about workers, in order.
func (s topScreen) ranks() []topRank {
	// Batches are counted by the seqs of the sources, which are the engines' own.
	type key struct {
		worker, endpoint string
		rank             uint32
	}
	lastSeq := make(map[key]uint64)
	if s.before != nil {
		for _, w := range s.before.workers {
			for _, src := range w.GetSources() {
				if src.GetStarted() {
					lastSeq[key{w.GetName(), src.GetEndpoint(), src.GetDpRank()}] = src.GetLastSeq()
				}
			}
		}
	}
	var all []topRank
	for _, w := range s.now.workers {
		for _, r := range ranksOf(w) {
			line := topRank{worker: w, rank: r}
			var states []string
			for _, src := range sourcesOf(w, r.GetDpRank()) {
				if state := lower(src.GetState().String(), "SOURCE_STATE_"); !slices.Contains(states, state) {
					states = append(states, state)
				}
				if last, ok := lastSeq[key{w.GetName(), src.GetEndpoint(), src.GetDpRank()}]; ok && src.GetLastSeq() > last {
					line.rate += s.perSecond(src.GetLastSeq() - last)
				}
			}
			if line.source = strings.Join(states, ", "); line.source == "" {
				line.source = "-"
			}
			for _, t := range r.GetBlocks() {
				if int(t.GetTier()) < len(line.blocks) {
					line.blocks[t.GetTier()] += t.GetBlocks()
				}
				line.all += t.GetBlocks()
			}
			all = append(all, line)
		}
	}
	slices.SortStableFunc(all, func(a, b topRank) int { // they come by name
		switch s.by {
		case topByRate:
			return cmp.Compare(b.rate, a.rate)
		case topByBlocks:
			return cmp.Compare(b.all, a.all)
		case topByGaps:
			return cmp.Compare(b.rank.GetGaps(), a.rank.GetGaps())
		default:
			return 0
		}
	})
	return all
}

// subscribers is the table of those.
func (s topScreen) subscribers() [][]topCell {
	head := []topCell{topText("SUBSCRIBER"), topText("CLIENT"), {text: "FOR", right: true}, {text: "SEQ", right: true}, {text: "BEHIND", right: true}, {text: "ENTRIES/S", right: true}, topText("FILTER")}
	for i := range head {
		head[i].style = faint
	}
	rows := [][]topCell{head}
	for _, one := range s.now.subscribers {
		perSecond := 0.0
		if s.before != nil {
			i := slices.IndexFunc(s.before.subscribers, func(o *kvcastv1.SubscriberStatus) bool {
				return o.GetPeer() == one.GetPeer() && o.GetStartTimeUnixNano() == one.GetStartTimeUnixNano()
			})
			if i >= 0 && s.before.subscribers[i].GetSeq() < one.GetSeq() {
				perSecond = s.perSecond(one.GetSeq() - s.before.subscribers[i].GetSeq())
			}
		}
		behind := topNumber(one.GetBehind())
		switch {
		case one.GetInSnapshot():
			behind = topCell{text: "snapshot", right: true, style: special}
		case one.GetBehind() > 0:
			behind = behind.as(change)
		}
		client, _, _ := strings.Cut(one.GetUserAgent(), " ")
		rows = append(rows, []topCell{
			topText(one.GetPeer()).as(strong), topText(client),
			{text: age(s.now.at.Sub(time.Unix(0, one.GetStartTimeUnixNano()))), right: true},
			topNumber(one.GetSeq()), behind, topRate(perSecond), topText(filterText(one.GetFilter())),
		})
	}
	return rows
}

func (s topScreen) perSecond(n uint64) float64 {
	return float64(n) / max(s.now.at.Sub(s.before.at).Seconds(), 1e-3)
}

func workerStyle(state kvcastv1.WorkerState) lipgloss.Style {
	switch state {
	case kvcastv1.WorkerState_WORKER_STATE_LIVE:
		return good
	case kvcastv1.WorkerState_WORKER_STATE_DISCONNECTED:
		return bad
	default:
		return change
	}
}

// filterText writes a filter as its flags.
func filterText(f *kvcastv1.Filter) string {
	if f == nil {
		return "all"
	}
	flags := filterFlags{Worker: f.GetWorkers(), Model: f.GetModels()}
	for _, t := range f.GetTiers() {
		flags.Tier = append(flags.Tier, tierName(t))
	}
	return strings.TrimSpace(flags.text())
}

// grouped writes a number with commas.
func grouped(n uint64) string {
	digits := decimal(n)
	var b strings.Builder
	for i, d := range digits {
		if i > 0 && (len(digits)-i)%3 == 0 {
			b.WriteByte(',')
		}
		b.WriteRune(d)
	}
	return b.String()
}

// rate writes a rate with a decimal where it is small.
func rate(perSecond float64) string {
	if perSecond < 10 {
		return fmt.Sprintf("%.1f", perSecond)
	}
	return grouped(uint64(perSecond + 0.5))
}

// age writes a duration by its two largest units.
func age(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd%02dh", int(d.Hours())/24, int(d.Hours())%24)
}
