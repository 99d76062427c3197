package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// printer writes what a subscriber receives, a line for each event.
type printer struct {
	out  io.Writer
	json bool
}

func newPrinter(out io.Writer, format string) *printer {
	return &printer{out: out, json: format == "json"}
}

// entry writes a line for each event of an entry.
func (p *printer) entry(epoch string, e *kvcastv1.Entry) error {
	for _, ev := range e.GetEvents() {
		if err := p.event(epoch, e, ev); err != nil {
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
}

func (p *printer) event(epoch string, e *kvcastv1.Entry, ev *kvcastv1.RouterEvent) error {
	if !p.json {
		_, err := fmt.Fprintf(p.out, "%-7d %s  %-10s %s\n", e.GetSeq(), clock(e), e.GetWorker(), describe(ev))
		return err
	}
	raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(ev)
	if err != nil {
		return fmt.Errorf("write event as JSON: %w", err)
	}
	var compact bytes.Buffer // protojson varies its white space on purpose
	if err := json.Compact(&compact, raw); err != nil {
		return fmt.Errorf("write event as JSON: %w", err)
	}
	return p.line(line{Epoch: epoch, Seq: decimal(e.GetSeq()), Worker: e.GetWorker(), Event: compact.Bytes()})
}

// control writes a line for a message that is no entries; people are spared
// those that say only that the stream is alive.
func (p *printer) control(m *kvcastv1.SubscribeResponse) error {
	switch {
	case m.GetAccepted() != nil:
		a := m.GetAccepted()
		if p.json {
			return p.line(line{Epoch: a.GetEpoch(), Seq: decimal(m.GetPosition().GetSeq()), Control: "accepted"})
		}
		retained := "nothing yet"
		switch {
		case a.GetNewestSeq() >= a.GetOldestSeq():
			retained = fmt.Sprintf("%d to %d", a.GetOldestSeq(), a.GetNewestSeq())
		case a.GetNewestSeq() > 0:
			retained = fmt.Sprintf("nothing any more of 1 to %d", a.GetNewestSeq())
		}
		_, err := fmt.Fprintf(p.out, "following epoch %s after seq %d; the server retains %s\n", a.GetEpoch(), m.GetPosition().GetSeq(), retained)
		return err
	case m.GetProgress() != nil && p.json:
		return p.line(line{Epoch: m.GetPosition().GetEpoch(), Seq: decimal(m.GetPosition().GetSeq()), Control: "progress"})
	}
	return nil
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
		fmt.Fprintf(&b, "GAP      missing batches: %d, engine seq %d to %d (%s)",
			e.Gap.GetMissedBatches(), e.Gap.GetFirstSeq(), e.Gap.GetLastSeq(), reason(e.Gap.GetReason()))
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
