package console_test

import (
	"flag"
	"strings"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

var picturesOf = flag.String("pictures-of", "", "URL of a console, such as that of make demo-console, whose views are written to the folder of -screenshots")

// TestPictures takes the pictures of the documentation, with the flags -pictures-of and -screenshots. Without them it visits the
// views of an idle server. With make demo-console running:
//
//	go run ./test/run -class exhaustive -run Pictures ./test/console -- -pictures-of URL -screenshots DIR
func TestPictures(t *testing.T) {
	testclass.Exhaustive(t)
	url := *picturesOf
	if url == "" {
		_, url = serve(t)
	}
	b := startBrowser(t)
	p := b.open(url)
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
