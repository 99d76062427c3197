package output

import (
	"bytes"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestProgressBarRedrawsItsLine(t *testing.T) {
	t.Setenv("CLICOLOR_FORCE", "1") // enables styles although out is no terminal
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		b := NewProgressBar(&out, 200)
		b.Update(50, "50 blocks")
		b.Update(60, "too soon")
		<-time.After(progressInterval)
		b.Update(300, "300 blocks") // more than the total
		b.Remove()
		drawn := strings.Split(out.String(), "\r")
		if len(drawn) != 4 || !strings.Contains(drawn[1], " 25%  50 blocks\x1b[K") || !strings.Contains(drawn[2], "100%  300 blocks\x1b[K") || drawn[3] != "\x1b[K" {
			t.Errorf("got %q", drawn)
		}
		if out.Reset(); true {
			NewProgressBar(&out, 1).Remove()
			(*ProgressBar)(nil).Update(1, "")
			(*ProgressBar)(nil).Remove()
		}
		if out.Len() > 0 {
			t.Errorf("removing a bar that was never drawn wrote %q", out.String())
		}
	})
}
