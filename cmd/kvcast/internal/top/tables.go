package top

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/output"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// order is the sort key of workers.
type order int

const (
	byName order = iota
	byRate
	byBlocks
	byGaps
	orders
)

func (o order) String() string { return [...]string{"name", "batches", "blocks", "gaps"}[o] }

// cell is a field of a table.
type cell struct {
	text       string
	style      lipgloss.Style
	alignRight bool
}

func text(text string) cell                 { return cell{text: output.Printable(text)} }
func right(text string) cell                { return cell{text: text, alignRight: true} }
func number(n uint64) cell                  { return right(output.Grouped(n)) }
func (c cell) as(style lipgloss.Style) cell { c.style = style; return c }

// table returns the lines of an aligned table. The first row is the heading.
func (s screen) table(rows [][]cell) []string {
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, c := range row {
			widths[i] = max(widths[i], lipgloss.Width(c.text))
		}
	}
	lines := make([]string, len(rows))
	for n, row := range rows {
		cells := make([]string, len(row))
		for i, c := range row {
			if n == 0 {
				c.style = output.Faint
			}
			padding := strings.Repeat(" ", widths[i]-lipgloss.Width(c.text))
			switch text := s.Style(c.style, c.text); {
			case c.alignRight:
				cells[i] = padding + text
			case i < len(row)-1:
				cells[i] = text + padding
			default:
				cells[i] = text
			}
		}
		lines[n] = s.cut(strings.Join(cells, "  "))
	}
	return lines
}

func (s screen) cut(line string) string {
	if s.width == 0 {
		return line
	}
	return lipgloss.NewStyle().Inline(true).MaxWidth(s.width).Render(line)
}

// summary returns two lines about the whole server.
func (s screen) summary() []string {
	now := s.now.status
	rate, retained := 0.0, uint64(0)
	if s.before != nil {
		rate = s.perSecond(s.before.status.GetNewestSeq(), now.GetNewestSeq())
	}
	if now.GetNewestSeq() >= now.GetOldestSeq() {
		retained = now.GetNewestSeq() - now.GetOldestSeq() + 1
	}
	counts := make(map[kvcastv1.WorkerState]int)
	for _, w := range s.now.workers {
		counts[w.GetState()]++
	}
	var states []string
	for _, state := range []kvcastv1.WorkerState{
		kvcastv1.WorkerState_WORKER_STATE_LIVE, kvcastv1.WorkerState_WORKER_STATE_CONNECTING,
		kvcastv1.WorkerState_WORKER_STATE_DEGRADED, kvcastv1.WorkerState_WORKER_STATE_DISCONNECTED,
		kvcastv1.WorkerState_WORKER_STATE_UNSPECIFIED,
	} {
		if n := counts[state]; n > 0 {
			states = append(states, s.Style(stateStyle(state), fmt.Sprintf("%d %s", n, output.WorkerState(state))))
		}
	}
	workers := output.Plural(len(s.now.workers), "worker")
	if len(states) > 0 {
		workers += " (" + strings.Join(states, ", ") + ")"
	}
	return []string{
		s.cut(fmt.Sprintf("%s · %s %s · seq %s, %s/s · retains %s, %.1f MiB · epoch %s",
			s.now.at.Format(time.TimeOnly), s.Style(output.Strong, s.addr), now.GetVersion(), output.Grouped(now.GetNewestSeq()), rateText(rate),
			output.Grouped(retained), float64(now.GetJournalBytes())/(1<<20), now.GetEpoch())),
		s.cut(fmt.Sprintf("%s · %s blocks · %s", workers, output.Grouped(now.GetBlocks()), output.Plural(len(s.now.subscribers), "subscriber"))),
	}
}

// notes returns the lines that say what is wrong with workers and what to do, as wide as the screen.
func (s screen) notes() (lines []string) {
	for _, note := range output.Notes(s.now.workers) {
		if s.width > 0 {
			note = ansi.Wrap(note, s.width, " ")
		}
		lines = append(lines, strings.Split(note, "\n")...)
	}
	return lines
}

// rank is a row of the workers' table.
type rank struct {
	worker *kvcastv1.WorkerStatus
	status *kvcastv1.RankStatus
	source string    // states of the sources
	replay string    // states of their replay sockets
	rate   float64   // batches per second
	blocks [5]uint64 // by tier
	total  uint64
}

// workerRows returns the table of workers, with a row for each dp rank.
func (s screen) workerRows() [][]cell {
	heading := []cell{text("WORKER")}
	owned := output.HasOwners(s.now.workers)
	if owned {
		heading = append(heading, text("INSTANCE"))
	}
	heading = append(heading, text("MODEL"), text("STATE"), right("RANK"), text("SOURCE"), text("REPLAY"), right("BATCHES/S"))
	ranks := s.ranks()
	var tiers []kvcastv1.Tier // device, and the tiers in use
	for t := kvcastv1.Tier_TIER_DEVICE; t <= kvcastv1.Tier_TIER_EXTERNAL; t++ {
		inUse := func(r rank) bool { return r.blocks[t] > 0 }
		if t == kvcastv1.Tier_TIER_DEVICE || slices.ContainsFunc(ranks, inUse) {
			tiers = append(tiers, t)
			heading = append(heading, right(strings.ToUpper(output.TierName(t))))
		}
	}
	accuracy := output.HasAccuracy(s.now.workers)
	if accuracy {
		heading = append(heading, right("EXACT"))
	}
	rows := [][]cell{append(heading, text("GAPS"))}
	for _, r := range ranks {
		state := r.worker.GetState()
		source, replay, gaps := text(r.source), text(r.replay), text(output.Gaps(r.status))
		rate := rateText(r.rate)
		if len(r.worker.GetSources()) == 0 { // another server has them
			rate = "-"
		}
		if r.source != "live" && r.source != "-" {
			source.style = output.Change
		}
		if r.replay != "answers" && r.replay != "-" {
			replay.style = output.Change
		}
		if r.status.GetIncomplete() {
			gaps.style = output.Bad
		}
		row := []cell{text(r.worker.GetName()).as(output.Strong)}
		if owned {
			row = append(row, text(output.Owner(r.worker)))
		}
		row = append(row,
			text(cmp.Or(r.worker.GetModel(), "-")), text(output.WorkerState(state)).as(stateStyle(state)),
			number(uint64(r.status.GetDpRank())), source, replay, right(rate))
		for _, t := range tiers {
			row = append(row, number(r.blocks[t]))
		}
		if accuracy {
			row = append(row, right(output.Accuracy(r.status)))
		}
		rows = append(rows, append(row, gaps))
	}
	return rows
}

// ranks returns the dp ranks of all workers, sorted.
func (s screen) ranks() []rank {
	type key struct {
		worker, endpoint string
		rank             uint32
	}
	lastSeqs := make(map[key]uint64) // engine seqs of the sources at the previous poll
	if s.before != nil {
		for _, w := range s.before.workers {
			for _, src := range w.GetSources() {
				if src.GetStarted() {
					lastSeqs[key{w.GetName(), src.GetEndpoint(), src.GetDpRank()}] = src.GetLastSeq()
				}
			}
		}
	}
	var all []rank
	for _, w := range s.now.workers {
		for _, status := range output.Ranks(w) {
			r := rank{worker: w, status: status}
			var states, replays []string
			for _, src := range output.RankSources(w, status.GetDpRank()) {
				if state := output.EnumName(src.GetState(), "SOURCE_STATE_"); !slices.Contains(states, state) {
					states = append(states, state)
				}
				if replay := output.ReplayState(src); !slices.Contains(replays, replay) {
					replays = append(replays, replay)
				}
				if last, ok := lastSeqs[key{w.GetName(), src.GetEndpoint(), src.GetDpRank()}]; ok {
					r.rate += s.perSecond(last, src.GetLastSeq())
				}
			}
			r.source, r.replay = cmp.Or(strings.Join(states, ", "), "-"), cmp.Or(strings.Join(replays, ", "), "-")
			for _, t := range status.GetBlocks() {
				if int(t.GetTier()) < len(r.blocks) {
					r.blocks[t.GetTier()] += t.GetBlocks()
				}
				r.total += t.GetBlocks()
			}
			all = append(all, r)
		}
	}
	slices.SortStableFunc(all, func(a, b rank) int {
		switch s.order {
		case byRate:
			return cmp.Compare(b.rate, a.rate)
		case byBlocks:
			return cmp.Compare(b.total, a.total)
		case byGaps:
			return cmp.Compare(b.status.GetGaps(), a.status.GetGaps())
		default:
			return 0 // the server sorts them by name
		}
	})
	return all
}

// subscriberRows returns the table of subscribers.
func (s screen) subscriberRows() [][]cell {
	rows := [][]cell{{text("SUBSCRIBER"), text("CLIENT"), right("FOR"), right("SEQ"), right("BEHIND"), right("ENTRIES/S"), text("FILTER")}}
	for _, sub := range s.now.subscribers {
		rate := 0.0
		if s.before != nil {
			i := slices.IndexFunc(s.before.subscribers, func(b *kvcastv1.SubscriberStatus) bool {
				return b.GetPeer() == sub.GetPeer() && b.GetStartTimeUnixNano() == sub.GetStartTimeUnixNano()
			})
			if i >= 0 {
				rate = s.perSecond(s.before.subscribers[i].GetSeq(), sub.GetSeq())
			}
		}
		behind := number(sub.GetBehind())
		switch {
		case sub.GetInSnapshot():
			behind = right("snapshot").as(output.Special)
		case sub.GetBehind() > 0:
			behind.style = output.Change
		}
		client := sub.GetClientId()
		if client == "" {
			client, _, _ = strings.Cut(sub.GetUserAgent(), " ")
		}
		rows = append(rows, []cell{
			text(sub.GetPeer()).as(output.Strong), text(client), right(s.since(sub.GetStartTimeUnixNano())),
			number(sub.GetSeq()), behind, right(rateText(rate)), text(filterText(sub.GetFilter())),
		})
	}
	return rows
}

// instanceRows returns the table of the servers that share the journal; nil if it is not shared.
func (s screen) instanceRows() [][]cell {
	all := s.now.status.GetInstances()
	if len(all) == 0 {
		return nil
	}
	rows := [][]cell{{text("INSTANCE"), text("STATE"), text("HOST"), right("PID"), text("GRPC"), text("VERSION"), right("FOR"), right("WORKERS"), right("BEHIND")}}
	for _, i := range all {
		name, state, workers := text(output.InstanceName(i.GetId())).as(output.Strong), text(output.InstanceState(i)).as(output.Good), right("-")
		if i.GetId() == s.now.status.GetInstanceId() {
			name.text += " (this)"
		}
		switch {
		case !i.GetLive():
			state.style = output.Bad
		case i.GetCutOff():
			state.style = output.Bad
		case i.GetDraining():
			state.style = output.Change
		}
		if i.GetIngests() {
			workers = number(i.GetWorkers())
		}
		behind := number(i.GetBehind())
		rows = append(rows, []cell{
			name, state, text(i.GetHost()), right(fmt.Sprint(i.GetPid())), text(i.GetGrpcAddress()), text(i.GetVersion()),
			right(s.since(i.GetStartTimeUnixNano())), workers, behind,
		})
	}
	return rows
}

// since returns the time from a time in nanoseconds since the Unix epoch until the sample.
func (s screen) since(unixNano int64) string {
	return max(0, s.now.at.Sub(time.Unix(0, unixNano))).Truncate(time.Second).String()
}

// perSecond returns the rate of a counter between the two samples; 0 if the counter was reset.
func (s screen) perSecond(before, now uint64) float64 {
	if now <= before {
		return 0
	}
	return float64(now-before) / max(s.now.at.Sub(s.before.at).Seconds(), 1e-3)
}

func stateStyle(state kvcastv1.WorkerState) lipgloss.Style {
	switch state {
	case kvcastv1.WorkerState_WORKER_STATE_LIVE:
		return output.Good
	case kvcastv1.WorkerState_WORKER_STATE_DISCONNECTED:
		return output.Bad
	default:
		return output.Change
	}
}

// filterText returns a filter as flags, or all.
func filterText(f *kvcastv1.Filter) string {
	if f == nil {
		return "all"
	}
	flags := cli.Filter{Worker: f.GetWorkers(), Model: f.GetModels()}
	for _, t := range f.GetTiers() {
		flags.Tier = append(flags.Tier, output.TierName(t))
	}
	return strings.TrimSpace(flags.FilterFlags())
}

// rateText returns a rate, with one decimal if it is below 10.
func rateText(perSecond float64) string {
	if perSecond < 10 {
		return fmt.Sprintf("%.1f", perSecond)
	}
	return output.Grouped(uint64(perSecond + 0.5))
}
