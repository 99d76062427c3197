package console_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
)

const token = "0123456789abcdef0123456789abcdef"

// subscribe opens a subscription. The client reads nothing but the headers.
func subscribe(t *testing.T, address string) {
	t.Helper()
	conn := harness.Dial(t, address, grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(64<<10))
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	stream, err := kvcastv1.NewRouterEventServiceClient(conn).Subscribe(ctx, &kvcastv1.SubscribeRequest{
		Start: &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}}, Filter: &kvcastv1.Filter{Models: []string{fleet.Model, "<b>other</b>"}},
	})
	if err == nil {
		_, err = stream.Header()
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestSubscribersAreShownAndTheirEnds(t *testing.T) {
	testclass.Process(t)
	b := startBrowser(t)
	f := fleet.New(t, 4)
	f.Faults, f.Rate = nil, 400
	server, url := serve(t, append(engines(t, f, "engine", 2), "--subscribers-stall", "2s")...)
	p := b.open(url + "#/stream")
	p.awaitText("main", "No router is subscribed.")
	p.awaitText("main", "The server has ended no subscription.")
	p.await("parseFloat(document.querySelector('.facts dd').innerText) > 0") // entries a second
	subscribe(t, fleet.Address(t, server))
	p.awaitText("td", "grpc-go/")
	p.awaitText("td", "m, <b>other</b>")
	p.await("[...document.querySelectorAll('td .bar')].some(e => /^[1-9][0-9,]* entries behind$/.test(e.getAttribute('aria-label')))")
	p.screenshot("stream")
	p.awaitText("td", "SLOW_SUBSCRIBER")
	p.awaitText("main", "No router is subscribed.")
	p.show("#/log?kinds=subscriber_ended")
	p.awaitText("td", "SLOW_SUBSCRIBER")
	wantQuiet(t, b)
}

func TestServerGoesAndComesBack(t *testing.T) {
	testclass.Process(t)
	b := startBrowser(t)
	f := fleet.New(t, 5)
	f.Faults = nil
	args := engines(t, f, "engine", 2)
	first, url := serve(t, args...)
	admin := func(url string) string { return strings.Trim(strings.TrimPrefix(url, "http://"), "/") }
	proxy := harness.NewProxy(t, admin(url))
	p := b.open("http://" + proxy.Addr() + "/")
	p.awaitText("#connection", "Live")
	p.await("document.querySelectorAll('.cards li').length === 2")

	proxy.Retarget("")
	if err := first.Kill(); err != nil {
		t.Fatal(err)
	}
	p.awaitText("#connection", "Server away")
	p.awaitText("#notice", "The server does not answer")
	p.await("document.querySelectorAll('.cards li').length === 2") // what was shown last stays
	p.screenshot("away")
	_ = b.messages() // of the lost connection

	_, url = serve(t, append(args, "--worker", f.Add("engine-2", 1, fleet.Bound()).Flag())...)
	proxy.Retarget(admin(url))
	p.awaitText("#connection", "Live")
	p.await("document.getElementById('notice').innerText === ''")
	p.await("document.querySelectorAll('.cards li').length === 3")
	p.await("[...document.querySelectorAll('.cards .numbers span:nth-child(2)')].every(e => parseFloat(e.innerText) > 0)")
}

func TestTokenIsAskedFor(t *testing.T) {
	testclass.Process(t)
	b := startBrowser(t)
	tokens := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(tokens, []byte("router "+token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	f := fleet.New(t, 6)
	_, url := serve(t, append(engines(t, f, "engine", 1), "--auth-tokens", tokens, "--admin", ":0")...)
	url = strings.Replace(url, "[::]", "127.0.0.1", 1)
	p := b.open(url)
	give := func(token string) {
		p.await("document.activeElement.id === 'token'")
		p.eval("(() => { document.getElementById('token').value = '"+token+"'; document.querySelector('form.login').requestSubmit(); })()", nil)
	}
	p.awaitText("#notice", "the call has no token")
	p.screenshot("denied")
	give("wrong-" + token)
	p.awaitText("#notice", "does not accept the token that was given")
	give(token)
	p.await("document.querySelectorAll('.cards li').length === 1")
	p.show("#/prefixes")
	p.awaitText("main", "Distinct blocks")
	var kept bool
	p.eval("!location.href.includes('"+token+"') && !JSON.stringify(localStorage).includes('"+token+"') && document.cookie === ''", &kept)
	if !kept {
		t.Error("the token is in the address, in cookies or in storage that outlives the tab")
	}
	another := b.open(url) // another session knows no token
	another.awaitText("#notice", "the call has no token")
}

// TestNamesCannotInject registers a worker whose names are parts of HTML, of a script and of a shell command. One that would change the
// direction of text is refused.
func TestNamesCannotInject(t *testing.T) {
	testclass.Process(t)
	b := startBrowser(t)
	const name = `<img src=x onerror="document.title='owned'"> ';$(x) {{1}} %zz`
	const model = `</datalist><script>document.title='owned'</script>`
	server, url := serve(t, "--bind", "tcp://127.0.0.1:*")
	conn := harness.Dial(t, fleet.Address(t, server))
	register := func(model string) error {
		_, err := kvcastv1.NewWorkerServiceClient(conn).RegisterWorker(t.Context(), &kvcastv1.RegisterWorkerRequest{Worker: &kvcastv1.WorkerSpec{
			Name: name, Model: model, Endpoint: "javascript:alert(1)", Labels: map[string]string{"<i>": "<u>"},
			Sources: []*kvcastv1.SourceSpec{{Connect: "tcp://127.0.0.1:1"}},
		}})
		return err
	}
	if status.Code(register(model+"\u202e")) != codes.InvalidArgument {
		t.Error("a model that changes the direction of text is not refused")
	}
	if err := register(model); err != nil {
		t.Fatal(err)
	}
	p := b.open(url)
	p.await("document.querySelector('.cards .name')?.innerText === " + quoted(name))
	p.eval("document.querySelector('.cards a').click()", nil)
	p.await("document.querySelector('h1').innerText === " + quoted(name))
	p.awaitText("main", model)
	p.awaitText("main", "javascript:alert(1)")
	p.eval("document.querySelectorAll('.source summary').forEach(s => s.click())", nil)
	p.awaitText(".source code", `'\''`) // the shell's quotes
	for _, view := range []string{"#/stream", "#/match", "#/prefixes", "#/log"} {
		p.show(view)
		p.awaitText("#connection", "Live")
	}
	p.awaitText("td", name)
	var clean bool
	p.eval("document.querySelectorAll('img, main script, main i, main u').length === 0 && document.title.endsWith('– kvcast')", &clean)
	if !clean {
		t.Error("a name was parsed as HTML")
	}
	wantQuiet(t, b)
}
