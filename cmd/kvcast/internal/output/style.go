// Package output writes what commands show: for people as text that stands out on a terminal, for programs as JSON lines.
package output

import (
	"io"
	"os"
	"strings"
	"unicode"

	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/colorprofile"
)

// Styler styles text for a terminal. The zero Styler returns it as it is.
type Styler struct{ enabled bool }

// NewStyler returns a Styler that is enabled if w is a terminal with colours and NO_COLOR is not set, or
// CLICOLOR_FORCE is 1.
func NewStyler(w io.Writer) Styler {
	return Styler{colorprofile.Detect(w, os.Environ()) > colorprofile.Ascii}
}

// The styles use the terminal's own sixteen colours, which its user has chosen to be readable.
var (
	Faint   = lipgloss.NewStyle().Faint(true)
	Strong  = lipgloss.NewStyle().Bold(true)
	Good    = lipgloss.NewStyle().Foreground(lipgloss.Green)
	Change  = lipgloss.NewStyle().Foreground(lipgloss.Yellow)
	Bad     = lipgloss.NewStyle().Foreground(lipgloss.Red).Bold(true)
	Special = lipgloss.NewStyle().Foreground(lipgloss.Cyan)
)

// Style returns the text with a style.
func (s Styler) Style(style lipgloss.Style, text string) string {
	if !s.enabled || text == "" {
		return text
	}
	return style.Render(text)
}

// Printable replaces the characters of a name that could control a terminal or begin another line. Names are
// untrusted.
func Printable(name string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '\uFFFD'
	}, name)
}
