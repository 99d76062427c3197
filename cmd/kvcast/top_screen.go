package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
)

// topScreen is the screen of top: a tea.Model.
type topScreen struct {
	paint
	ctx      context.Context //nolint:containedctx // a tea.Cmd has no other way to it
	addr     string
	interval time.Duration
	look     func(context.Context) (*topSample, error)

	now, before *topSample
	err         error // of the last look
	by          topOrder
	scroll      int
	width       int // 0: not known
	height      int
}

// topLook is what came of a look, topTick that it is time for one.
type (
	topLook struct {
		sample *topSample
		err    error
	}
	topTick struct{}
)

// Init implements tea.Model.
func (s topScreen) Init() tea.Cmd { return s.lookCmd }

func (s topScreen) lookCmd() tea.Msg {
	sample, err := s.look(s.ctx)
	return topLook{sample, err}
}

// Update implements tea.Model.
func (s topScreen) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case topLook:
		s = s.looked(msg)
		return s, tea.Tick(s.interval, func(time.Time) tea.Msg { return topTick{} })
	case topTick:
		return s, s.lookCmd
	case tea.WindowSizeMsg:
		s.width, s.height = msg.Width, msg.Height
	case tea.KeyPressMsg:
		page := max(1, s.height-topFrame)
		switch msg.String() {
		case "q", "ctrl+c", "esc":
			return s, tea.Quit
		case "s":
			s.by = (s.by + 1) % topOrders
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
		s.scroll = max(0, min(s.scroll, s.lines()-page))
	}
	return s, nil
}

// looked takes what came of a look. What was seen before stays where it failed.
func (s topScreen) looked(l topLook) topScreen {
	if s.err = l.err; l.err != nil {
		return s
	}
	s.before, s.now = s.now, l.sample
	if s.before != nil && s.before.status.GetEpoch() != s.now.status.GetEpoch() {
		s.before = nil // the server began anew
	}
	return s
}

// View implements tea.Model.
func (s topScreen) View() tea.View {
	v := tea.NewView(s.text())
	v.AltScreen = true
	v.WindowTitle = "kvcast top " + s.addr
	return v
}

// once writes the screen after two looks.
func (s topScreen) once(ctx context.Context, out io.Writer) error {
	tick := time.NewTicker(s.interval)
	defer tick.Stop()
	for {
		sample, err := s.look(ctx)
		if err != nil {
			return err
		}
		if s = s.looked(topLook{sample: sample}); s.before != nil {
			_, err := fmt.Fprintln(out, s.text())
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// topFrame is how many lines of the screen do not scroll: two of the summary, the
// hint, and an empty one.
const topFrame = 4

// text is the screen: what is above the tables, as much of them as fits, and how
// to go on.
func (s topScreen) text() string {
	if s.now == nil {
		if s.err != nil {
			return s.as(bad, s.err.Error())
		}
		return "looking at " + s.addr + " ..."
	}
	lines := append(s.summary(), "")
	body := s.body()
	hint := ""
	if s.height > 0 {
		room := max(1, s.height-topFrame)
		from := max(0, min(s.scroll, len(body)-room))
		hint = fmt.Sprintf("q ends · s sorts (by %s)", s.by)
		if len(body) > room {
			hint += fmt.Sprintf(" · ↑↓ scroll (lines %d to %d of %d)", from+1, from+room, len(body))
		}
		body = body[from:min(len(body), from+room)]
		for len(body) < room {
			body = append(body, "")
		}
	}
	lines = append(lines, body...)
	switch {
	case s.err != nil:
		lines = append(lines, s.as(bad, s.err.Error()))
	case hint != "":
		lines = append(lines, s.as(faint, hint))
	}
	return strings.Join(lines, "\n")
}

// lines is the number of lines that scroll.
func (s topScreen) lines() int {
	if s.now == nil {
		return 0
	}
	return len(s.body())
}

// body is the two tables.
func (s topScreen) body() []string {
	lines := s.table(s.workers())
	return append(append(lines, ""), s.table(s.subscribers())...)
}
