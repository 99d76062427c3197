// Package output formats the output of commands: text with styles for terminals, and JSON lines for programs.
package output

import (
	"io"
	"os"
	"strings"
	"unicode"

	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/colorprofile"
)

// Styler styles text for a terminal. The zero Styler returns text unchanged.
type Styler struct{ enabled bool }

// NewStyler returns a Styler that is enabled if w is a terminal with colours and NO_COLOR is not set, or CLICOLOR_FORCE is 1.
func NewStyler(w io.Writer) Styler {
	return Styler{colorprofile.Detect(w, os.Environ()) > colorprofile.Ascii}
}

// The styles use the sixteen colours of the terminal's theme.
var (
	Faint   = lipgloss.NewStyle().Faint(true)
	Strong  = lipgloss.NewStyle().Bold(true)
	Good    = lipgloss.NewStyle().Foreground(lipgloss.Green)
	Change  = lipgloss.NewStyle().Foreground(lipgloss.Yellow)
	Bad     = lipgloss.NewStyle().Foreground(lipgloss.Red).Bold(true)
	Special = lipgloss.NewStyle().Foreground(lipgloss.Cyan)
)

// Style renders text with a style, if the Styler is enabled.
func (s Styler) Style(style lipgloss.Style, text string) string {
	if !s.enabled || text == "" {
		return text
	}
	return style.Render(text)
}

// Printable replaces control characters and line breaks in a name. Names come from clients and engines, and are untrusted.
func Printable(name string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '\uFFFD'
	}, name)
}
