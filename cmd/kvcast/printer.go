package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"charm.land/lipgloss/v2"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// printer writes what a stream consists of, a line for each event.
type printer struct {
	out  io.Writer
	json bool
	paint

	epoch  string
	at     position // where to resume from
	events uint64   // printed, without a snapshot's
	// within tells that a snapshot has begun and not ended: what it has printed
	// so far.
	within  bool
	workers int
	blocks  int
}

func newPrinter(out io.Writer, format string) *printer {
	return &printer{out: out, json: format == "json", paint: paintFor(out)}
}

// message prints a message, but no further entries once limit events (0: no
// limit) have been printed.
func (p *printer) message(m *kvcastv1.SubscribeResponse, limit uint64) error {
	switch {
	case m.GetAccepted() != nil:
		p.epoch = m.GetAccepted().GetEpoch()
		if err := p.accepted(m); err != nil {
			return err
		}
	case m.GetSnapshotBegin() != nil:
		p.epoch = m.GetSnapshotBegin().GetEpoch()
		p.within, p.workers, p.blocks = true, 0, 0
		if err := p.control("snapshot_begin", nil, ""); err != nil {
			return err
		}
	case m.GetSnapshotWorker() != nil:
		if err := p.snapshotWorker(m.GetSnapshotWorker()); err != nil {
			return err
		}
	case m.GetSnapshotEnd() != nil:
		p.within = false
		text := fmt.Sprintf("snapshot of epoch %s at seq %d: %s, %s", p.epoch, m.GetPosition().GetSeq(), plural(p.workers, "worker"), plural(p.blocks, "block"))
		if err := p.control("snapshot_end", m.GetPosition(), text); err != nil {
			return err
		}
	case m.GetProgress() != nil:
		if err := p.control("progress", m.GetPosition(), ""); err != nil {
			return err
		}
	}
	for _, b := range m.GetSnapshotBlocks() {
		for _, ev := range b.GetEvents() {
			p.blocks += len(ev.GetStored().GetBlockHashes())
			if err := p.event(&kvcastv1.Entry{Worker: b.GetWorker()}, ev); err != nil {
				return err
			}
		}
	}
	for _, e := range m.GetEntries() {
		if err := p.entry(e); err != nil {
			return err
		}
		if p.within {
			continue
		}
		p.events += uint64(len(e.GetEvents()))
		p.at = position{set: true, epoch: p.epoch, seq: e.GetSeq()}
		if limit > 0 && p.events >= limit {
			return nil
		}
	}
	if at := m.GetPosition(); at != nil {
		p.at = position{set: true, epoch: at.GetEpoch(), seq: at.GetSeq()}
	}
	return nil
}

// entry writes a line for each event of an entry.
func (p *printer) entry(e *kvcastv1.Entry) error {
	for _, ev := range e.GetEvents() {
		if err := p.event(e, ev); err != nil {
			return err
		}
	}
	return nil
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

func (p *printer) event(e *kvcastv1.Entry, ev *kvcastv1.RouterEvent) error {
	seq := ""
	if e.GetSeq() != 0 {
		seq = decimal(e.GetSeq())
	}
	if !p.json {
		_, err := fmt.Fprintf(p.out, "%s  %s %s\n", p.as(faint, fmt.Sprintf("%-7s %s", seq, clock(e))),
			p.as(strong, fmt.Sprintf("%-10s", visible(e.GetWorker()))), p.as(styleOf(ev), describe(ev)))
		return err
	}
	raw, err := compactJSON(ev)
	if err != nil {
		return err
	}
	return p.line(line{Epoch: p.epoch, Seq: seq, Worker: e.GetWorker(), Event: raw})
}

// control writes a line for a message that is no events: for people the text,
// if there is any.
func (p *printer) control(name string, at *kvcastv1.Position, text string) error {
	if !p.json {
		if text == "" {
			return nil
		}
		_, err := fmt.Fprintln(p.out, p.as(special, text))
		return err
	}
	l := line{Epoch: p.epoch, Control: name}
	if at != nil {
		l.Seq = decimal(at.GetSeq())
	}
	return p.line(l)
}

func (p *printer) accepted(m *kvcastv1.SubscribeResponse) error {
	a := m.GetAccepted()
	from := "from a snapshot"
	if m.GetPosition() != nil {
		from = "after seq " + decimal(m.GetPosition().GetSeq())
	}
	retained := "nothing yet"
	switch {
	case a.GetNewestSeq() >= a.GetOldestSeq():
		retained = fmt.Sprintf("%d to %d", a.GetOldestSeq(), a.GetNewestSeq())
	case a.GetNewestSeq() > 0:
		retained = fmt.Sprintf("nothing any more of 1 to %d", a.GetNewestSeq())
	}
	return p.control("accepted", m.GetPosition(), fmt.Sprintf("epoch %s %s; the server retains %s", a.GetEpoch(), from, retained))
}

func (p *printer) snapshotWorker(w *kvcastv1.SnapshotWorker) error {
	p.workers++
	if !p.json {
		incomplete := ""
		if len(w.GetIncompleteRanks()) > 0 {
			incomplete = p.as(bad, fmt.Sprintf(", INCOMPLETE at dp ranks %v", w.GetIncompleteRanks()))
		}
		_, err := fmt.Fprintf(p.out, "%-7s %12s  %s      worker of model %q, last event %d%s\n", "", "",
			p.as(strong, fmt.Sprintf("%-10s", visible(w.GetWorker()))), w.GetAdded().GetModel(), w.GetLastEventId(), incomplete)
		return err
	}
	raw, err := compactJSON(w)
	if err != nil {
		return err
	}
	return p.line(line{Epoch: p.epoch, Worker: w.GetWorker(), Control: "snapshot_worker", Record: raw})
}

// compactJSON writes a message with the names of the contract, and without the
// white space that protojson varies on purpose.
func compactJSON(m proto.Message) (json.RawMessage, error) {
	raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("write JSON: %w", err)
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, raw); err != nil {
		return nil, fmt.Errorf("write JSON: %w", err)
	}
	return compact.Bytes(), nil
}

// plural writes a number of things.
func plural(n int, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}

func (p *printer) line(l line) error {
	b, err := json.Marshal(l)
	if err != nil {
		return fmt.Errorf("write line as JSON: %w", err)
	}
	_, err = p.out.Write(append(b, '\n'))
	return err
}

func decimal(n uint64) string { return strconv.FormatUint(n, 10) }

// clock is when an entry came about, or blanks where no time is known.
func clock(e *kvcastv1.Entry) string {
	const layout = "15:04:05.000"
	if t := e.GetIngestTimeUnixNano(); t != 0 {
		return time.Unix(0, t).Format(layout)
	}
	return strings.Repeat(" ", len(layout))
}

// styleOf is green for what comes, yellow for what goes, red for what may be wrong.
func styleOf(ev *kvcastv1.RouterEvent) lipgloss.Style {
	switch ev.GetEvent().(type) {
	case *kvcastv1.RouterEvent_Stored:
		return good
	case *kvcastv1.RouterEvent_Removed:
		return change
	case *kvcastv1.RouterEvent_Gap:
		return bad
	case *kvcastv1.RouterEvent_Cleared:
		return change.Bold(true)
	default:
		return special
	}
}

// describe says in words what an event says.
func describe(ev *kvcastv1.RouterEvent) string {
	var b strings.Builder
	if ev.DpRank != nil {
		fmt.Fprintf(&b, "dp%-2d ", ev.GetDpRank())
	} else {
		b.WriteString("     ")
	}
	switch e := ev.GetEvent().(type) {
	case *kvcastv1.RouterEvent_Stored:
		fmt.Fprintf(&b, "stored   %s %s%s", blocks(e.Stored.GetBlockHashes()), tierName(ev.GetTier()), chain(e.Stored))
	case *kvcastv1.RouterEvent_Removed:
		fmt.Fprintf(&b, "removed  %s %s", blocks(e.Removed.GetBlockHashes()), tierName(ev.GetTier()))
	case *kvcastv1.RouterEvent_Cleared:
		fmt.Fprintf(&b, "cleared  (%s)", reason(e.Cleared.GetReason()))
	case *kvcastv1.RouterEvent_Gap:
		if n := e.Gap.GetMissedBatches(); n > 0 {
			fmt.Fprintf(&b, "GAP      missing batches: %d, engine seq %d to %d (%s)",
				n, e.Gap.GetFirstSeq(), e.Gap.GetLastSeq(), reason(e.Gap.GetReason()))
		} else {
			fmt.Fprintf(&b, "GAP      what it holds is no longer known for sure (%s)", reason(e.Gap.GetReason()))
		}
	case *kvcastv1.RouterEvent_WorkerAdded:
		fmt.Fprintf(&b, "worker added, model %q", e.WorkerAdded.GetModel())
	case *kvcastv1.RouterEvent_WorkerRemoved:
		fmt.Fprintf(&b, "worker removed (%s)", reason(e.WorkerRemoved.GetReason()))
	default:
		b.WriteString("an event of a kind that this version does not know")
	}
	return b.String()
}

// blocks tells how many there are, and their ends.
func blocks(hashes []uint64) string {
	switch n := len(hashes); n {
	case 0:
		return "  0 blocks"
	case 1:
		return fmt.Sprintf("  1 block  %016x", hashes[0])
	default:
		return fmt.Sprintf("%3d blocks %016x..%016x", n, hashes[0], hashes[n-1])
	}
}

func chain(s *kvcastv1.Stored) string {
	var b strings.Builder
	if s.ParentHash != nil {
		fmt.Fprintf(&b, " after %016x", s.GetParentHash())
	}
	if s.GetLoraName() != "" {
		fmt.Fprintf(&b, " lora %q", s.GetLoraName())
	}
	return b.String()
}

func tierName(t kvcastv1.Tier) string {
	return strings.ToLower(strings.TrimPrefix(t.String(), "TIER_"))
}

func reason(r fmt.Stringer) string {
	return strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(r.String(), "REASON_"), "_", " "))
}
