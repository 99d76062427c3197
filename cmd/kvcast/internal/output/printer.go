package output

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"charm.land/lipgloss/v2"

	"github.com/kvcast/kvcast/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Printer writes a stream: a line for each event, and for each message without events.
type Printer struct {
	Styler
	out    io.Writer
	isJSON bool
	epoch  string

	At     client.Position // to resume after; zero before the first
	Events uint64          // number of printed events, without snapshots
	Blocks int             // number of blocks in the last snapshot

	inSnapshot bool
	workers    int // number of workers in the last snapshot
}

// NewPrinter returns a Printer for the format text or json.
func NewPrinter(out io.Writer, format string) *Printer {
	return &Printer{Styler: NewStyler(out), out: out, isJSON: format == "json"}
}

// Message prints a message. It prints no further entry once p.Events has reached limit; 0 means no limit.
func (p *Printer) Message(m *kvcastv1.SubscribeResponse, limit uint64) error {
	if err := p.control(m); err != nil {
		return err
	}
	for _, b := range m.GetSnapshotBlocks() {
		for _, ev := range b.GetEvents() {
			p.Blocks += len(ev.GetStored().GetBlockHashes())
			if err := p.event(&kvcastv1.Entry{Worker: b.GetWorker()}, ev); err != nil {
				return err
			}
		}
	}
	for _, e := range m.GetEntries() {
		if err := p.Entry(e); err != nil {
			return err
		}
		if p.inSnapshot {
			continue
		}
		p.Events += uint64(len(e.GetEvents()))
		p.At = client.Position{Epoch: p.epoch, Seq: e.GetSeq()}
		if limit > 0 && p.Events >= limit {
			return nil
		}
	}
	if at := m.GetPosition(); at != nil {
		p.At = client.Position{Epoch: at.GetEpoch(), Seq: at.GetSeq()}
	}
	return nil
}

// Entry prints the events of an entry.
func (p *Printer) Entry(e *kvcastv1.Entry) error {
	for _, ev := range e.GetEvents() {
		if err := p.event(e, ev); err != nil {
			return err
		}
	}
	return nil
}

// control prints a message without events.
func (p *Printer) control(m *kvcastv1.SubscribeResponse) error {
	l := line{Control: "progress"}
	if at := m.GetPosition(); at != nil {
		l.Seq = fmt.Sprint(at.GetSeq())
	}
	text := ""
	switch {
	case m.GetAccepted() != nil:
		p.epoch, l.Control = m.GetAccepted().GetEpoch(), "accepted"
		text = p.Style(Special, acceptedText(m))
	case m.GetSnapshotBegin() != nil:
		p.epoch, l = m.GetSnapshotBegin().GetEpoch(), line{Control: "snapshot_begin"}
		p.inSnapshot, p.workers, p.Blocks = true, 0, 0
	case m.GetSnapshotWorker() != nil:
		p.workers++
		w := m.GetSnapshotWorker()
		record, err := JSON(w)
		if err != nil {
			return err
		}
		l = line{Worker: w.GetWorker(), Control: "snapshot_worker", Record: record}
		text = p.snapshotWorkerText(w)
	case m.GetSnapshotEnd() != nil:
		p.inSnapshot, l.Control = false, "snapshot_end"
		text = p.Style(Special, fmt.Sprintf("snapshot of epoch %s at seq %d: %s, %s", p.epoch, m.GetPosition().GetSeq(), Plural(p.workers, "worker"), Plural(p.Blocks, "block")))
	case m.GetProgress() == nil:
		return nil
	}
	return p.write(l, text)
}

// line is a line of JSON.
type line struct {
	Epoch   string          `json:"epoch"`
	Seq     string          `json:"seq,omitempty"`
	Worker  string          `json:"worker,omitempty"`
	Event   json.RawMessage `json:"event,omitempty"`
	Control string          `json:"control,omitempty"`
	Record  json.RawMessage `json:"record,omitempty"` // with snapshot_worker
}

// write writes a line as JSON or as text. It omits empty text.
func (p *Printer) write(l line, text string) error {
	if p.isJSON {
		l.Epoch = p.epoch
		raw, err := json.Marshal(l)
		if err != nil {
			return fmt.Errorf("write line as JSON: %w", err)
		}
		text = string(raw)
	}
	if text == "" {
		return nil
	}
	out := p.out
	if p.isJSON {
		out = EscapedJSON(out)
	}
	_, err := fmt.Fprintln(out, text)
	return err
}

func (p *Printer) event(e *kvcastv1.Entry, ev *kvcastv1.RouterEvent) error {
	l := line{Worker: e.GetWorker()}
	if e.GetSeq() != 0 {
		l.Seq = fmt.Sprint(e.GetSeq())
	}
	if !p.isJSON {
		return p.write(l, fmt.Sprintf("%s  %s %s", p.Style(Faint, fmt.Sprintf("%-7s %s", l.Seq, clock(e))),
			p.Style(Strong, fmt.Sprintf("%-10s", Printable(e.GetWorker()))), p.Style(eventStyle(ev), eventText(ev))))
	}
	var err error
	if l.Event, err = JSON(ev); err != nil {
		return err
	}
	return p.write(l, "")
}

func acceptedText(m *kvcastv1.SubscribeResponse) string {
	a := m.GetAccepted()
	from := "from a snapshot"
	if m.GetPosition() != nil {
		from = "after seq " + fmt.Sprint(m.GetPosition().GetSeq())
	}
	retained := "no entries yet"
	switch {
	case a.GetNewestSeq() >= a.GetOldestSeq():
		retained = fmt.Sprintf("%d to %d", a.GetOldestSeq(), a.GetNewestSeq())
	case a.GetNewestSeq() > 0:
		retained = fmt.Sprintf("none of 1 to %d", a.GetNewestSeq())
	}
	return fmt.Sprintf("epoch %s %s; the server retains %s", a.GetEpoch(), from, retained)
}

func (p *Printer) snapshotWorkerText(w *kvcastv1.SnapshotWorker) string {
	incomplete := ""
	if len(w.GetIncompleteRanks()) > 0 {
		incomplete = p.Style(Bad, fmt.Sprintf(", INCOMPLETE at dp ranks %v", w.GetIncompleteRanks()))
	}
	return fmt.Sprintf("%-7s %12s  %s      worker of model %q, last event %d%s", "", "",
		p.Style(Strong, fmt.Sprintf("%-10s", Printable(w.GetWorker()))), w.GetAdded().GetModel(), w.GetLastEventId(), incomplete)
}

// clock returns the ingest time of an entry; blanks if it is unknown.
func clock(e *kvcastv1.Entry) string {
	const layout = "15:04:05.000"
	if t := e.GetIngestTimeUnixNano(); t != 0 {
		return time.Unix(0, t).Format(layout)
	}
	return strings.Repeat(" ", len(layout))
}

func eventStyle(ev *kvcastv1.RouterEvent) lipgloss.Style {
	switch ev.GetEvent().(type) {
	case *kvcastv1.RouterEvent_Stored, *kvcastv1.RouterEvent_GroupStored:
		return Good
	case *kvcastv1.RouterEvent_Removed, *kvcastv1.RouterEvent_GroupRemoved:
		return Change
	case *kvcastv1.RouterEvent_Gap:
		return Bad
	case *kvcastv1.RouterEvent_Cleared:
		return Change.Bold(true)
	default:
		return Special
	}
}

func eventText(ev *kvcastv1.RouterEvent) string {
	rank := "     "
	if ev.DpRank != nil {
		rank = fmt.Sprintf("dp%-2d ", ev.GetDpRank())
	}
	switch e := ev.GetEvent().(type) {
	case *kvcastv1.RouterEvent_Stored:
		return rank + fmt.Sprintf("stored   %s %s%s", blocksText(e.Stored.GetBlockHashes()), TierName(ev.GetTier()), chainText(e.Stored))
	case *kvcastv1.RouterEvent_Removed:
		return rank + fmt.Sprintf("removed  %s %s", blocksText(e.Removed.GetBlockHashes()), TierName(ev.GetTier()))
	case *kvcastv1.RouterEvent_Cleared:
		return rank + fmt.Sprintf("cleared  (%s)", reasonText(e.Cleared.GetReason()))
	case *kvcastv1.RouterEvent_Gap:
		if n := e.Gap.GetMissedBatches(); n > 0 {
			return rank + fmt.Sprintf("GAP      missing batches: %d, engine seq %d to %d (%s)",
				n, e.Gap.GetFirstSeq(), e.Gap.GetLastSeq(), reasonText(e.Gap.GetReason()))
		}
		return rank + fmt.Sprintf("GAP      blocks may differ from the engine's (%s)", reasonText(e.Gap.GetReason()))
	case *kvcastv1.RouterEvent_GroupsOmitted:
		return rank + "groups   there are other attention groups: the engine may reuse less than a prefix of the main group"
	case *kvcastv1.RouterEvent_Groups:
		return rank + "groups   " + groupsText(e.Groups)
	case *kvcastv1.RouterEvent_GroupStored:
		return rank + fmt.Sprintf("stored   %s %s group %d", blocksText(e.GroupStored.GetBlockHashes()), TierName(ev.GetTier()), e.GroupStored.GetGroup())
	case *kvcastv1.RouterEvent_GroupRemoved:
		return rank + fmt.Sprintf("removed  %s %s group %d", blocksText(e.GroupRemoved.GetBlockHashes()), TierName(ev.GetTier()), e.GroupRemoved.GetGroup())
	case *kvcastv1.RouterEvent_Resolved:
		var reasons []string
		for _, reason := range e.Resolved.GetReasons() {
			reasons = append(reasons, reasonText(reason))
		}
		return rank + fmt.Sprintf("resolved (%s)", strings.Join(reasons, ", "))
	case *kvcastv1.RouterEvent_WorkerAdded:
		return rank + fmt.Sprintf("worker added, model %q", e.WorkerAdded.GetModel()) + poolText(e.WorkerAdded)
	case *kvcastv1.RouterEvent_WorkerRemoved:
		return rank + fmt.Sprintf("worker removed (%s)", reasonText(e.WorkerRemoved.GetReason()))
	default:
		return rank + "event of a kind that is unknown to this version"
	}
}

// poolText says whether a worker is a pool, or which pools it can load from.
func poolText(added *kvcastv1.WorkerAdded) string {
	switch {
	case added.GetPool():
		return ", a pool"
	case len(added.GetPools()) > 0:
		return fmt.Sprintf(", loads from %q", added.GetPools())
	}
	return ""
}

// blocksText returns the number of blocks, and the first and last hash.
func blocksText(hashes []uint64) string {
	switch n := len(hashes); n {
	case 0:
		return "  0 blocks"
	case 1:
		return fmt.Sprintf("  1 block  %016x", hashes[0])
	default:
		return fmt.Sprintf("%3d blocks %016x..%016x", n, hashes[0], hashes[n-1])
	}
}

func chainText(s *kvcastv1.Stored) string {
	text := ""
	if s.ParentHash != nil {
		text += fmt.Sprintf(" after %016x", s.GetParentHash())
	}
	if s.GetLoraName() != "" {
		text += fmt.Sprintf(" lora %q", s.GetLoraName())
	}
	return text
}

func reasonText(r fmt.Stringer) string {
	return strings.ReplaceAll(EnumName(r, "REASON_"), "_", " ")
}

// groupsText returns a text for attention groups.
func groupsText(g *kvcastv1.Groups) string {
	var all []string
	for _, group := range g.GetGroups() {
		kind := strings.ToLower(strings.TrimPrefix(group.GetKind().String(), "KIND_"))
		text := fmt.Sprintf("%d %s of %d tokens", group.GetIndex(), kind, group.GetBlockSize())
		if group.GetWindow() > 0 {
			text += fmt.Sprintf(", window %d", group.GetWindow())
		}
		if group.GetChunk() > 0 {
			text += fmt.Sprintf(", chunk %d", group.GetChunk())
		}
		if group.GetDrops() {
			text += ", drafts"
		}
		if group.GetMain() {
			text += ", main"
		}
		all = append(all, text)
	}
	text := strings.Join(all, "; ")
	switch {
	case g.GetMissing() != "":
		text += " (prefixes are upper bounds: " + g.GetMissing() + ")"
	case g.GetHashing() == nil:
		text += " (prefixes are upper bounds: how the engine computes hashes is not known)"
	}
	return text
}
