package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"charm.land/bubbles/v2/progress"
	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/colorprofile"
)

// progressBar shows how far long work is, as a line that is drawn over itself. A nil
// one shows nothing.
type progressBar struct {
	out   io.Writer
	bar   progress.Model
	total uint64
	drawn time.Time
}

// progressEvery is how often a bar is drawn at most.
const progressEvery = 100 * time.Millisecond

func newProgressBar(out io.Writer, total uint64) *progressBar {
	return &progressBar{
		out: colorprofile.NewWriter(out, os.Environ()), total: total,
		bar: progress.New(progress.WithWidth(40), progress.WithFillCharacters('█', '░'), progress.WithColors(lipgloss.Green)),
	}
}

// at draws the bar when so much is done, but not too often.
func (b *progressBar) at(done uint64, text string) {
	if b == nil || time.Since(b.drawn) < progressEvery {
		return
	}
	b.drawn = time.Now()
	part := 1.0
	if done < b.total {
		part = float64(done) / float64(b.total)
	}
	_, _ = fmt.Fprintf(b.out, "\r%s  %s\x1b[K", b.bar.ViewAs(part), text)
}

// end takes the bar away.
func (b *progressBar) end() {
	if b != nil && !b.drawn.IsZero() {
		_, _ = fmt.Fprint(b.out, "\r\x1b[K")
	}
}
