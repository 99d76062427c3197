package main

import (
	"io"
	"os"
	"strings"
	"unicode"

	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/colorprofile"
	"golang.org/x/term"
)

// paint makes text stand out on a terminal. The zero paint leaves it as it is.
type paint struct{ on bool }

// paintFor paints what goes to a terminal that has colours, unless NO_COLOR is set;
// CLICOLOR_FORCE=1 has whatever it goes to painted.
func paintFor(w io.Writer) paint {
	return paint{colorprofile.Detect(w, os.Environ()) > colorprofile.Ascii}
}

// The colours are those of the terminal's own sixteen, which people have chosen to
// be able to read.
var (
	faint   = lipgloss.NewStyle().Faint(true)
	strong  = lipgloss.NewStyle().Bold(true)
	good    = lipgloss.NewStyle().Foreground(lipgloss.Green)
	change  = lipgloss.NewStyle().Foreground(lipgloss.Yellow)
	bad     = lipgloss.NewStyle().Foreground(lipgloss.Red).Bold(true)
	special = lipgloss.NewStyle().Foreground(lipgloss.Cyan)
)

func (p paint) as(style lipgloss.Style, text string) string {
	if !p.on || text == "" {
		return text
	}
	return style.Render(text)
}

// visible makes a name that others chose safe to show: what is no letter, number,
// mark or space of its own could tell a terminal to do something, or be a line of its
// own.
func visible(name string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '\uFFFD'
	}, name)
}

// isTerminal tells whether something is written to, or read by, a person.
func isTerminal(std any) bool {
	f, ok := std.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
