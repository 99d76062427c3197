package console_test

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/console"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/incident"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/harness"
)

var views = []string{"#/fleet", "#/worker/engine-1", "#/stream", "#/match", "#/prefixes", "#/log"}

// world is a server in this process with workers that hold blocks in all tiers, and a console.
func world(t *testing.T, workers int) (url string, c *console.Console) {
	t.Helper()
	log := new(incident.Log)
	i := harness.StartInstance(t, harness.InstanceConfig{Server: server.Config{Incidents: log, Sources: func() map[string][]*kvcastv1.SourceStatus {
		all := make(map[string][]*kvcastv1.SourceStatus)
		for n := range workers {
			delay := int64(n%50) * 1e5
			all[name(n)] = []*kvcastv1.SourceStatus{{
				Engine: "vllm", Endpoint: fmt.Sprintf("tcp://10.0.%d.%d:5557", n/256, n%256), State: kvcastv1.SourceState_SOURCE_STATE_LIVE, Started: true, LastSeq: 7,
				EngineDelayNano: &delay,
			}}
		}
		return all
	}}})
	for n := range workers {
		i.AddWorker(feed.Worker{Name: name(n), Model: fmt.Sprintf("model-%d", n%2), Labels: map[string]string{"zone": "a"}})
		var chain []uint64
		for b := range 1 + 7*n%90 {
			chain = append(chain, uint64(n%10)<<32|uint64(b))
		}
		tier := []kvblock.Tier{kvblock.TierDevice, kvblock.TierHostPinned, kvblock.TierDisk}[n%3]
		for _, tier := range []kvblock.Tier{kvblock.TierDevice, tier} {
			i.Batch(name(n), wire.Event{Kind: wire.KindStored, Tier: tier, BlockHashes: chain, TokensHashes: chain, BlockSize: 16})
		}
		switch n % 10 {
		case 1:
			i.Lane(name(n)).Gap(feed.Gap{Reason: feed.GapReplayForgotten, FirstSeq: 3, LastSeq: 5, Missed: 3, At: int64(n)})
		case 2:
			i.Batch(name(n))
			i.Lane(name(n)).Batch(&feed.Batch{GroupsOmitted: true})
		case 3:
			i.Lane(name(n)).Gap(feed.Gap{Reason: feed.GapAmbiguousPublisher, At: int64(n)})
		}
	}
	log.Add(&kvcastv1.Incident{Kind: kvcastv1.IncidentKind_INCIDENT_KIND_REPAIRED, Worker: name(1), Reason: "gap", Batches: 3, DurationNano: 5e6})
	log.Add(&kvcastv1.Incident{Kind: kvcastv1.IncidentKind_INCIDENT_KIND_SUBSCRIBER_ENDED, Peer: "10.0.0.1:4711", Reason: "SLOW_SUBSCRIBER", Behind: 4000, DurationNano: 5e9})
	c = console.New(console.Config{Server: i.Server, Loopback: true, About: console.About{GRPC: "127.0.0.1:50051"}})
	s := httptest.NewServer(c)
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
		c.Close()
	})
	return s.URL + "/", c
}

func name(n int) string { return fmt.Sprintf("engine-%d", n) }

// settled waits until a view has shown what it asks for.
func (p *tab) settled(view string) {
	p.t.Helper()
	p.show(view)
	p.awaitText("#connection", "Live")
	p.await(map[string]string{
		"#/fleet":           "document.querySelectorAll('.cards li, .tiles li').length > 0",
		"#/worker/engine-1": "document.querySelectorAll('tbody tr').length > 3",
		"#/stream":          "document.querySelectorAll('.facts dd').length > 0 && document.querySelectorAll('tbody tr').length > 0",
		"#/match":           "document.querySelectorAll('#recent option').length > 1",
		"#/prefixes":        "document.querySelectorAll('td.node').length > 0",
		"#/log":             "document.querySelectorAll('tbody tr').length > 3",
	}[view])
}

// TestPagesFitEveryWidth checks that no view is wider than the screen, from a small phone to 4k.
func TestPagesFitEveryWidth(t *testing.T) {
	testclass.Process(t)
	b := startBrowser(t)
	url, _ := world(t, 20)
	p := b.open(url)
	for _, size := range [][2]int{{320, 640}, {768, 1024}, {1280, 900}, {3840, 2160}} {
		p.size(size[0], size[1])
		for _, view := range views {
			p.settled(view)
			if view == "#/match" {
				p.eval("(() => { const s = document.getElementById('recent'); s.selectedIndex = 1; s.dispatchEvent(new Event('change')); })()", nil)
				p.awaitText("pre", "grpcurl")
			}
			var width int
			p.eval("document.documentElement.scrollWidth", &width)
			if width > size[0] {
				t.Errorf("%s is %d pixels wide on a screen of %d", view, width, size[0])
			}
			p.screenshot(fmt.Sprintf("width-%d-%s", size[0], strings.Trim(strings.ReplaceAll(view, "/", "-"), "#-")))
		}
	}
	wantQuiet(t, b)
}

// TestThousandWorkersAreReadable checks that a fleet of 1,000 fits a few screens, and that each rank has its trust and its name.
func TestThousandWorkersAreReadable(t *testing.T) {
	testclass.Process(t)
	b := startBrowser(t)
	url, _ := world(t, 1000)
	p := b.open(url)
	p.await("document.querySelectorAll('.tiles li').length === 1000")
	var height int
	p.eval("document.querySelector('.tiles').offsetHeight", &height)
	if height > 1800 {
		t.Errorf("the grid is %d pixels high, want at most two screens", height)
	}
	for _, want := range []string{"gap: 100 ranks", "conflict: 100 ranks"} {
		p.awaitText(".attention", want)
	}
	p.await("document.querySelectorAll('.tiles a.trust_upper_bound').length === 100 && document.querySelectorAll('.tiles a.trust_exact').length === 700")
	p.await("document.querySelectorAll('.tiles a[tabindex=\"0\"]').length === 1")
	p.await("[...document.querySelectorAll('.tiles a')].every(a => /^engine-\\d+[✓≤!] (exact|upper bound|degraded).* blocks/.test(a.textContent))")
	p.eval("document.querySelector('.tiles a').focus()", nil)
	p.awaitText(".detail", "engine-0: exact")
	p.screenshot("thousand")
	p.dark(true)
	p.screenshot("thousand-dark")
	p.eval("(() => { const e = document.getElementById('form'); e.value = 'table'; e.dispatchEvent(new Event('input', {bubbles: true})); })()", nil)
	p.await("document.querySelectorAll('tbody tr').length === 100")
	p.awaitText(".pager", "page 1 of 10")
	p.eval("[...document.querySelectorAll('.pager button')].at(-1).click()", nil)
	p.awaitText(".pager", "page 2 of 10")
	p.awaitText("tbody tr a", "engine-100")
	wantQuiet(t, b)
}

// TestHiddenPageHasNoStream hides a page, as a browser does with a tab in the background, and shows it again.
func TestHiddenPageHasNoStream(t *testing.T) {
	testclass.Process(t)
	b := startBrowser(t)
	url, c := world(t, 3)
	p := b.open(url)
	hide := func(hidden bool) {
		p.eval(fmt.Sprintf("Object.defineProperty(document, 'hidden', {value: %t, configurable: true}); document.dispatchEvent(new Event('visibilitychange'))", hidden), nil)
	}
	for range 2 {
		p.awaitText("#connection", "Live")
		p.await("document.querySelectorAll('.cards li').length === 3")
		p.eval("document.querySelector('.cards').replaceChildren(), document.querySelector('.cards').keyedChildren = new Map()", nil)
		hide(true)
		closed := make(chan struct{})
		go func() { c.Close(); close(closed) }() // waits for all streams, and the poll that they share
		select {
		case <-closed:
		case <-harness.Context(t).Done():
			t.Fatal("the stream of a hidden page is still open")
		}
		hide(false)
	}
	p.await("document.querySelectorAll('.cards li').length === 3") // of a new stream
	wantQuiet(t, b)
}

// TestPagesAreAccessible runs axe-core on each view.
func TestPagesAreAccessible(t *testing.T) {
	testclass.Process(t)
	found, err := filepath.Glob("../../bin/console/axe-*.min.js")
	if err != nil || len(found) == 0 {
		t.Skip("axe-core is not there: run make console-test, which gets it from npm")
	}
	axe, err := os.ReadFile(found[0])
	if err != nil {
		t.Fatal(err)
	}
	b := startBrowser(t)
	url, _ := world(t, 12)
	p := b.open(url)
	p.eval(string(axe)+"; undefined", nil)
	p.settled("#/fleet")
	for _, form := range []string{"tiles", "table", "cards"} {
		p.eval("(() => { const e = document.getElementById('form'); e.value = '"+form+"'; e.dispatchEvent(new Event('input', {bubbles: true})); })()", nil)
		p.await(fmt.Sprintf("Boolean(document.querySelector('.tiles')?.checkVisibility()) === %t && Boolean(document.querySelector('table').checkVisibility()) === %t", form == "tiles", form == "table"))
		p.wantAccessible(form)
	}
	for _, dark := range []bool{false, true} {
		p.dark(dark)
		for _, width := range []int{320, 1280} {
			p.size(width, 900)
			for _, view := range views {
				p.settled(view)
				if view == "#/match" {
					p.eval("(() => { const s = document.getElementById('recent'); s.selectedIndex = 1; s.dispatchEvent(new Event('change')); })()", nil)
					p.awaitText("pre", "grpcurl")
				}
				p.eval("document.querySelectorAll('.source').forEach(d => { d.open = true; })", nil)
				p.wantAccessible(fmt.Sprintf("%s, dark %t, %d pixels", view, dark, width))
			}
		}
	}
}

// wantAccessible fails the test for each rule of axe-core that the page violates.
func (p *tab) wantAccessible(view string) {
	p.t.Helper()
	var violations []struct {
		ID, Impact, Help string
		Nodes            []struct{ HTML, FailureSummary string }
	}
	p.eval("axe.run(document, {resultTypes: ['violations']}).then(r => r.violations)", &violations)
	for _, v := range violations {
		text, err := json.MarshalIndent(v.Nodes[:min(len(v.Nodes), 3)], "", "  ")
		if err != nil {
			p.t.Fatal(err)
		}
		p.t.Errorf("%s: %s, %s: %s\n%s", view, v.Impact, v.ID, v.Help, text)
	}
}
