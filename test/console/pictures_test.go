package console_test

import (
	"flag"
	"strings"
	"testing"
	"time"
)

var picturesOf = flag.String("pictures-of", "", "URL of a console, such as that of make demo-console, whose views are written to the folder of -screenshots")

// TestPictures takes the pictures of the documentation.
func TestPictures(t *testing.T) {
	if *picturesOf == "" || *screenshots == "" {
		t.Skip("it takes pictures for the documentation: run make demo-console, and make console-test ARGS='-run Pictures -pictures-of URL -screenshots DIR'")
	}
	b := startBrowser(t)
	p := b.open(*picturesOf)
	p.size(1280, 800)
	for _, view := range []string{"#/fleet", "#/worker/engine-4", "#/stream", "#/match", "#/prefixes", "#/log"} {
		p.show(view)
		time.Sleep(8 * time.Second) // for rates and charts to fill
		name := strings.Trim(strings.NewReplacer("#", "", "/", "-", "engine-4", "").Replace(view), "-")
		p.screenshot(name)
		p.dark(true)
		p.screenshot(name + "-dark")
		p.dark(false)
	}
}
