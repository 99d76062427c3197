package output

import (
	"fmt"
	"io"
	"os"
	"time"

	"charm.land/bubbles/v2/progress"
	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/colorprofile"
)

// ProgressBar is a line that is redrawn as work proceeds. A nil ProgressBar draws nothing.
type ProgressBar struct {
	out   io.Writer
	bar   progress.Model
	total uint64
	drawn time.Time
}

// progressInterval is the minimum time between two redraws.
const progressInterval = 100 * time.Millisecond

// NewProgressBar returns a bar that is full when the work done reaches total.
func NewProgressBar(out io.Writer, total uint64) *ProgressBar {
	return &ProgressBar{
		out: colorprofile.NewWriter(out, os.Environ()), total: total,
		bar: progress.New(progress.WithWidth(40), progress.WithFillCharacters('█', '░'), progress.WithColors(lipgloss.Green)),
	}
}

// Update redraws the bar, at most once per progressInterval.
func (b *ProgressBar) Update(done uint64, text string) {
	if b == nil || time.Since(b.drawn) < progressInterval {
		return
	}
	b.drawn = time.Now()
	part := 1.0
	if done < b.total {
		part = float64(done) / float64(b.total)
	}
	_, _ = fmt.Fprintf(b.out, "\r%s  %s\x1b[K", b.bar.ViewAs(part), text)
}

// Remove erases the bar.
func (b *ProgressBar) Remove() {
	if b != nil && !b.drawn.IsZero() {
		_, _ = fmt.Fprint(b.out, "\r\x1b[K")
	}
}
