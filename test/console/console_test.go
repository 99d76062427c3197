package console_test

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
)

var screenshots = flag.String("screenshots", "", "folder to which pictures of the pages are written")

func TestMain(m *testing.M) { os.Exit(harness.RunTests(m)) }

// faults are those of engines whose replay has every batch.
var faults = map[simulator.Fault]float64{simulator.FaultDrop: 0.02}

// engines starts some engines, and returns the flags of a server that reads them.
func engines(t *testing.T, f *fleet.Fleet, prefix string, n int) (args []string) {
	t.Helper()
	for i := range n {
		args = append(args, "--worker", f.Add(fmt.Sprintf("%s-%d", prefix, i), 1, fleet.Bound()).Flag())
	}
	return args
}

// serve starts a server, and returns the URL of its admin port.
func serve(t *testing.T, args ...string) (*harness.Process, string) {
	t.Helper()
	p := fleet.Start(t, args...)
	fleet.Address(t, p)
	admin, err := p.Admin()
	if err != nil {
		t.Fatal(err)
	}
	return p, "http://" + admin + "/"
}

// wantQuiet fails the test if a page has logged an error, or violated its policy.
func wantQuiet(t *testing.T, b *browser) {
	t.Helper()
	for _, m := range b.messages() {
		t.Errorf("a page logged: %.2000s", m)
	}
}

// wantOneOrigin fails the test if a page has loaded anything from elsewhere.
func wantOneOrigin(t *testing.T, p *tab) {
	t.Helper()
	var others []string
	p.eval("performance.getEntriesByType('resource').map(e => e.name).filter(name => !name.startsWith(location.origin + '/'))", &others)
	if len(others) > 0 {
		t.Errorf("the page loads %q", others)
	}
}

func TestFleetAndWorker(t *testing.T) {
	testclass.Process(t)
	b := startBrowser(t)
	good := fleet.New(t, 1)
	good.Faults = faults
	lossy := fleet.New(t, 2)
	lossy.Faults = map[simulator.Fault]float64{simulator.FaultLose: 0.05, simulator.FaultRestartInPlace: 0.01}
	server, url := serve(t, append(engines(t, good, "good", 2), engines(t, lossy, "lossy", 1)...)...)
	p := b.open(url)
	p.await("document.querySelectorAll('.cards li').length === 3")
	p.awaitText("#connection", "Live")
	p.awaitText(".attention", "gap: 1 rank")
	p.await("document.querySelector('.cards a.trust_degraded .name').innerText === 'lossy-0'")
	p.await("document.querySelectorAll('.cards a.trust_exact').length === 2")
	p.await("[...document.querySelectorAll('.cards .numbers span:nth-child(2)')].every(e => parseFloat(e.innerText) > 0)") // batches a second
	p.await("[...document.querySelectorAll('.cards .numbers span:nth-child(3)')].every(e => /[µm]?s$/.test(e.innerText))") // delay
	p.screenshot("fleet")

	// The arrow keys move within the grid, which is one stop of the tab key.
	p.eval("document.querySelector('.cards a[tabindex=\"0\"]').focus()", nil)
	p.press("ArrowRight", 39)
	p.await("document.activeElement.innerText.startsWith('good-1')")
	p.press("End", 35)
	p.await("document.activeElement.innerText.startsWith('lossy-0') && document.querySelectorAll('.cards a[tabindex=\"0\"]').length === 1")

	set := func(id, value string) {
		p.eval(fmt.Sprintf("(() => { const e = document.getElementById(%q); e.value = %q; e.dispatchEvent(new Event('input', {bubbles: true})); })()", id, value), nil)
	}
	set("trust", "TRUST_DEGRADED")
	p.await("document.querySelectorAll('.cards li').length === 1")
	set("trust", "")
	set("search", "good")
	p.await("document.querySelectorAll('.cards li').length === 2")
	set("search", "nothing like it")
	p.awaitText(".empty", "No rank matches.")
	set("search", "")
	set("form", "table")
	p.await("document.querySelectorAll('table tbody tr').length === 3")
	set("form", "tiles")
	p.await("document.querySelectorAll('.tiles li').length === 3")
	p.eval("document.querySelector('.source summary').click()", nil)
	p.awaitText(".source code", "kvcast.v1.RouterEventService/ListWorkers")

	p.show("#/worker/lossy-0")
	p.awaitText("h1", "lossy-0")
	p.awaitText("section table", "vllm")
	p.awaitText(".kind, td", "engine restarted")
	p.awaitText("td", "engine seqs")
	p.await("document.querySelectorAll('.timeline rect.bad').length > 0 && document.querySelectorAll('.timeline rect.change').length > 0")
	p.await("[...document.querySelectorAll('td')].some(e => /^stored \\d+ blocks? device/.test(e.innerText))")
	p.screenshot("worker")
	p.show("#/worker/good-1")
	p.awaitText("td", "repaired")
	report(t, fleet.Address(t, server), &kvcastv1.Outcome{Worker: "good-1", Position: &kvcastv1.Position{Seq: newest(t, server)}, PredictedTokens: 32, CachedTokens: 16})
	p.awaitText(".ranks", "Of 1 reported prediction, 0 were exact (0.0 %), 1 too long, 0 too short.")
	p.show("#/worker/nobody")
	p.awaitText("main", "The server does not know this worker")
	wantOneOrigin(t, p)
	wantQuiet(t, b)
}

// newest returns the newest seq of a server.
func newest(t *testing.T, p *harness.Process) uint64 {
	t.Helper()
	s, err := kvcastv1.NewRouterEventServiceClient(harness.Dial(t, fleet.Address(t, p))).GetStatus(t.Context(), &kvcastv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return s.GetNewestSeq()
}

// report reports an outcome to a server.
func report(t *testing.T, addr string, o *kvcastv1.Outcome) {
	t.Helper()
	res, err := kvcastv1.NewRouterEventServiceClient(harness.Dial(t, addr)).ReportOutcome(t.Context(), &kvcastv1.ReportOutcomeRequest{Outcomes: []*kvcastv1.Outcome{o}})
	if err != nil || res.GetIgnored() != 0 {
		t.Fatalf("report %v: %v, %v", o, res, err)
	}
}

func TestPrefixesAndMatch(t *testing.T) {
	testclass.Process(t)
	b := startBrowser(t)
	var args []string
	var fleets []*fleet.Fleet
	for i := range 3 { // with the same prompts
		f := fleet.New(t, 7)
		f.Faults, f.Rate = nil, 40+float64(i)
		args = append(args, engines(t, f, fmt.Sprint("twin", i), 1)...)
		fleets = append(fleets, f)
	}
	_, url := serve(t, args...)
	p := b.open(url + "#/prefixes")
	p.await("document.querySelectorAll('td.node').length > 0")
	p.awaitText("td", "2 ranks")
	p.awaitText("main", "would not be computed and held again")
	for _, f := range fleets {
		f.Pause()
	}
	// The next answer is of what the engines hold now.
	p.eval("window.pausedAt = new Date().toTimeString().slice(0, 8)", nil)
	p.await("[...document.querySelectorAll('.facts div')].some(e => e.innerText.startsWith('Read at') && e.children[1].innerText > window.pausedAt)")
	p.await("document.querySelectorAll('td.node').length > 0")
	p.screenshot("prefixes")
	p.eval("[...document.querySelectorAll('td a')].find(a => a.innerText === 'Match').click()", nil)
	p.awaitText("h1", "Match")
	p.awaitText("main", "a prefix, the longest")
	p.await("document.querySelectorAll('tbody tr').length >= 2")
	p.awaitText("pre", "grpcurl -plaintext -d")
	p.awaitText("pre", `"matches": [`)
	p.screenshot("match")

	p.show("#/fleet")
	p.awaitText("h1", "Fleet")
	p.show("#/match")
	p.await("document.querySelectorAll('#recent option').length > 1")
	p.eval("(() => { const s = document.getElementById('recent'); s.selectedIndex = 1; s.dispatchEvent(new Event('change')); })()", nil)
	p.awaitText("main", "at seq")
	p.eval("(() => { document.getElementById('kind').value = 'token_ids'; document.getElementById('prompt').value = '1 2 cat'; document.querySelector('form').requestSubmit(); })()", nil)
	p.awaitText(".notice", "“cat” is no token id")
	p.eval("(() => { document.getElementById('prompt').value = '[1, 2, 3]'; document.querySelector('form').requestSubmit(); })()", nil)
	p.awaitText("main", "No rank holds the first block")
	wantOneOrigin(t, p)
	wantQuiet(t, b)
}

func TestLogIsFilteredAndLinked(t *testing.T) {
	testclass.Process(t)
	b := startBrowser(t)
	f := fleet.New(t, 3)
	f.Faults = map[simulator.Fault]float64{simulator.FaultLose: 0.02, simulator.FaultDrop: 0.05}
	_, url := serve(t, engines(t, f, "engine", 2)...)
	p := b.open(url + "#/log")
	p.awaitText(".kind", "gap")
	p.awaitText(".kind", "repaired")
	p.awaitText(".kind", "worker added")
	p.screenshot("log")
	p.show("#/log?kinds=gap&worker=engine-1")
	p.await("[...document.querySelectorAll('tbody tr')].length > 0 && [...document.querySelectorAll('tbody tr')].every(r => r.innerText.includes('gap') && r.innerText.includes('engine-1'))")
	p.await("document.getElementById('of').value === 'engine-1' && document.querySelectorAll('.check input:checked').length === 1")
	p.eval("document.querySelector('tbody a').click()", nil) // a time
	p.await("location.hash.startsWith('#/log?at=') && document.getElementById('at').value !== ''")
	p.awaitText(".kind", "repaired")
	p.show("#/log?at=2020-01-01T12:00")
	p.awaitText(".empty", "Nothing of that has happened")
	p.eval("document.querySelector('form button').click()", nil)
	p.awaitText(".kind", "gap")
	wantQuiet(t, b)
}
