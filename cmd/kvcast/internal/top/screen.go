package top

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/output"
)

// screen is a tea.Model.
type screen struct {
	output.Styler
	ctx      context.Context //nolint:containedctx // a tea.Cmd cannot get it otherwise
	addr     string
	interval time.Duration
	poll     func(context.Context) (*sample, error)

	now, before *sample // of the last two successful polls
	err         error   // of the last poll
	order       order
	scroll      int
	width       int // 0: unknown
	height      int
}

// polled is the result of a poll.
type polled struct {
	sample *sample
	err    error
}

// tick means that the next poll is due.
type tick struct{}

func (s screen) Init() tea.Cmd { return s.pollCmd }

func (s screen) pollCmd() tea.Msg {
	sample, err := s.poll(s.ctx)
	return polled{sample, err}
}

func (s screen) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case polled:
		return s.polled(msg), tea.Tick(s.interval, func(time.Time) tea.Msg { return tick{} })
	case tick:
		return s, s.pollCmd
	case tea.WindowSizeMsg:
		s.width, s.height = msg.Width, msg.Height
	case tea.KeyPressMsg:
		page := max(1, s.height-fixedLines)
		switch msg.String() {
		case "q", "ctrl+c", "esc":
			return s, tea.Quit
		case "s":
			s.order = (s.order + 1) % orders
		case "up", "k":
			s.scroll--
		case "down", "j":
			s.scroll++
		case "pgup":
			s.scroll -= page
		case "pgdown", "space":
			s.scroll += page
		case "home":
			s.scroll = 0
		}
		s.scroll = max(0, min(s.scroll, len(s.body())-page))
	}
	return s, nil
}

// polled returns the screen after a poll. A failed poll does not change the samples.
func (s screen) polled(p polled) screen {
	if s.err = p.err; p.err != nil {
		return s
	}
	s.before, s.now = s.now, p.sample
	if s.before != nil && s.before.status.GetEpoch() != s.now.status.GetEpoch() {
		s.before = nil // the server was restarted
	}
	return s
}

func (s screen) View() tea.View {
	v := tea.NewView(s.text())
	v.AltScreen = true
	v.WindowTitle = "kvcast top " + s.addr
	return v
}

// once writes the screen after two polls.
func (s screen) once(ctx context.Context, out io.Writer) error {
	ticker := time.NewTicker(s.interval)
	defer ticker.Stop()
	for {
		sample, err := s.poll(ctx)
		if err != nil {
			return err
		}
		if s = s.polled(polled{sample: sample}); s.before != nil {
			_, err := fmt.Fprintln(out, s.text())
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// fixedLines is the number of lines that do not scroll: two of the summary, an empty line, and the hint.
const fixedLines = 4

// text returns the screen: the summary, the visible lines of the tables, and a hint about keys or the last error.
func (s screen) text() string {
	if s.now == nil {
		if s.err != nil {
			return s.Style(output.Bad, s.err.Error())
		}
		return "connecting to " + s.addr + " ..."
	}
	body, last := s.body(), ""
	if s.height > 0 {
		room := max(1, s.height-fixedLines)
		from := max(0, min(s.scroll, len(body)-room))
		last = fmt.Sprintf("q quits · s sorts (by %s)", s.order)
		if len(body) > room {
			last += fmt.Sprintf(" · ↑↓ scroll (lines %d to %d of %d)", from+1, from+room, len(body))
		}
		last = s.Style(output.Faint, last)
		body = append(body, make([]string, max(0, room-len(body)))...)[from : from+room]
	}
	if s.err != nil {
		last = s.Style(output.Bad, s.err.Error())
	}
	lines := append(append(s.summary(), ""), body...)
	if last != "" {
		lines = append(lines, last)
	}
	return strings.Join(lines, "\n")
}

// body returns the lines of the tables, which scroll.
func (s screen) body() []string {
	if s.now == nil {
		return nil
	}
	lines := append(append(s.table(s.workerRows()), ""), s.table(s.subscriberRows())...)
	if instances := s.instanceRows(); instances != nil {
		lines = append(append(lines, ""), s.table(instances)...)
	}
	if notes := s.notes(); len(notes) > 0 {
		lines = append(append(lines, ""), notes...)
	}
	return lines
}
