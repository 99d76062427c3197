package console_test

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/kvcast/kvcast/test/harness"
)

// programs are the names of Chromium, in the order in which they are looked for.
var programs = []string{"chromium", "chromium-browser", "google-chrome"}

// browser is headless Chromium, which ends with the test.
type browser struct {
	t     *testing.T
	write io.Writer
	ended chan struct{} // closed when the browser has closed its pipe

	mu      sync.Mutex // guards all below
	last    int
	waiting map[int]chan reply
	logged  []string // errors and violations of the content security policy, of all tabs
}

type reply struct {
	Result json.RawMessage
	Error  *struct{ Message string }
}

// startBrowser starts Chromium, or skips the test if it is not installed.
func startBrowser(t *testing.T) *browser {
	t.Helper()
	program := ""
	for _, name := range programs {
		if path, err := exec.LookPath(name); err == nil {
			program = path
			break
		}
	}
	if program == "" {
		t.Skip("Chromium is not installed: run apt-get install chromium")
	}
	commandsRead, commands, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	replies, repliesWrite, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars", //nolint:noctx // closing the pipe ends it
		"--disable-background-networking", "--disable-extensions", "--user-data-dir="+t.TempDir(), "--remote-debugging-pipe", "about:blank")
	cmd.ExtraFiles = []*os.File{commandsRead, repliesWrite} // file descriptors 3 and 4
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_, _ = commandsRead.Close(), repliesWrite.Close()
	b := &browser{t: t, write: commands, ended: make(chan struct{}), waiting: make(map[int]chan reply)}
	go b.read(replies)
	t.Cleanup(func() {
		_, _ = b.call("", "Browser.close", nil)
		_ = commands.Close()
		_ = cmd.Wait()
		<-b.ended
		_ = replies.Close()
	})
	return b
}

// read passes replies to those who wait for them.
func (b *browser) read(from io.Reader) {
	defer close(b.ended)
	messages := bufio.NewReaderSize(from, 1<<20)
	for {
		text, err := messages.ReadBytes(0)
		if err != nil {
			return
		}
		var m struct {
			ID     int
			Method string
			Params json.RawMessage
			reply
		}
		if err := json.Unmarshal(text[:len(text)-1], &m); err != nil {
			continue
		}
		b.mu.Lock()
		if m.ID != 0 {
			b.waiting[m.ID] <- m.reply
			delete(b.waiting, m.ID)
		}
		if m.Method == "Runtime.exceptionThrown" || m.Method == "Log.entryAdded" {
			b.logged = append(b.logged, string(m.Params))
		}
		b.mu.Unlock()
	}
}

// call calls a method of the DevTools protocol in a session; an empty session is the browser.
func (b *browser) call(session, method string, params any) (json.RawMessage, error) {
	answered := make(chan reply, 1)
	b.mu.Lock()
	b.last++
	id := b.last
	b.waiting[id] = answered
	b.mu.Unlock()
	command := map[string]any{"id": id, "method": method}
	if params != nil {
		command["params"] = params
	}
	if session != "" {
		command["sessionId"] = session
	}
	text, err := json.Marshal(command)
	if err != nil {
		return nil, err
	}
	if _, err := b.write.Write(append(text, 0)); err != nil {
		return nil, err
	}
	select {
	case r := <-answered:
		if r.Error != nil {
			return nil, errors.New(r.Error.Message)
		}
		return r.Result, nil
	case <-b.ended:
		return nil, errors.New("the browser has ended")
	case <-time.After(harness.Timeout):
		return nil, fmt.Errorf("%s: no answer within %v", method, harness.Timeout)
	}
}

// messages returns what the pages have logged since the last call: errors, and violations of their policy.
func (b *browser) messages() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := b.logged
	b.logged = nil
	return all
}

// tab is a page.
type tab struct {
	*browser
	session string
}

// open opens a page in a tab of its own, with storage of its own.
func (b *browser) open(url string) *tab {
	b.t.Helper()
	var context struct{ BrowserContextID string }
	b.must("", "Target.createBrowserContext", nil, &context)
	var target struct{ TargetID string }
	b.must("", "Target.createTarget", map[string]any{"url": "about:blank", "browserContextId": context.BrowserContextID, "width": 1280, "height": 900}, &target)
	var attached struct{ SessionID string }
	b.must("", "Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &attached)
	p := &tab{b, attached.SessionID}
	p.must(p.session, "Runtime.enable", nil, nil)
	p.must(p.session, "Log.enable", nil, nil)
	p.must(p.session, "Page.enable", nil, nil)
	p.must(p.session, "Page.navigate", map[string]any{"url": url}, nil)
	p.await("document.readyState === 'complete'")
	return p
}

// must calls a method, and decodes its result unless to is nil.
func (b *browser) must(session, method string, params, to any) {
	b.t.Helper()
	result, err := b.call(session, method, params)
	if err == nil && to != nil {
		err = json.Unmarshal(result, to)
	}
	if err != nil {
		b.t.Fatalf("%s: %v", method, err)
	}
}

// eval evaluates an expression in the page, waits for it if it is a promise, and decodes its value unless to is nil.
func (p *tab) eval(expression string, to any) {
	p.t.Helper()
	var out struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails *struct {
			Text      string
			Exception struct{ Description string }
		}
	}
	p.must(p.session, "Runtime.evaluate", map[string]any{"expression": expression, "awaitPromise": true, "returnByValue": true}, &out)
	if out.ExceptionDetails != nil {
		p.t.Fatalf("%s: %s %s", expression, out.ExceptionDetails.Text, out.ExceptionDetails.Exception.Description)
	}
	if to == nil {
		return
	}
	if err := json.Unmarshal(out.Result.Value, to); err != nil {
		p.t.Fatalf("%s: %v", expression, err)
	}
}

// await waits until a condition holds, which is evaluated whenever the page changes.
func (p *tab) await(condition string) {
	p.t.Helper()
	timer := time.AfterFunc(harness.Timeout/2, func() { // before the evaluation ends without an answer
		p.t.Logf("%s does not become true; the page logged %q and shows:\n%s", condition, p.messages(), p.text("body"))
		p.screenshot("failed")
	})
	defer timer.Stop()
	p.eval(fmt.Sprintf(`new Promise(resolve => {
		const holds = () => { try { return Boolean(%s); } catch { return false; } };
		const observer = new MutationObserver(() => check());
		const check = () => { if (holds()) { observer.disconnect(); document.removeEventListener('readystatechange', check); resolve(); } };
		observer.observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
		document.addEventListener('readystatechange', check);
		check();
	})`, condition), nil)
}

// text returns the text of the first element that a selector selects.
func (p *tab) text(selector string) (text string) {
	p.t.Helper()
	p.eval(fmt.Sprintf("document.querySelector(%q)?.innerText ?? ''", selector), &text)
	return text
}

// awaitText waits until the page shows a text in an element that a selector selects.
func (p *tab) awaitText(selector, text string) {
	p.t.Helper()
	p.await(fmt.Sprintf("[...document.querySelectorAll(%q)].some(e => e.innerText.includes(%q))", selector, text))
}

// show shows a view by its address.
func (p *tab) show(hash string) {
	p.t.Helper()
	p.eval(fmt.Sprintf("location.hash = %q", hash), nil)
}

// size sets the size of the page, in CSS pixels.
func (p *tab) size(width, height int) {
	p.t.Helper()
	p.must(p.session, "Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false}, nil)
}

// dark sets whether the system prefers a dark page.
func (p *tab) dark(dark bool) {
	p.t.Helper()
	value := "light"
	if dark {
		value = "dark"
	}
	p.must(p.session, "Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": value}}}, nil)
}

// press presses a key, such as Tab or ArrowRight.
func (p *tab) press(key string, code int) {
	p.t.Helper()
	for _, kind := range []string{"rawKeyDown", "keyUp"} {
		p.must(p.session, "Input.dispatchKeyEvent", map[string]any{"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}, nil)
	}
}

// screenshot writes a picture of the page to the folder of the flag -screenshots, if it is set.
func (p *tab) screenshot(name string) {
	p.t.Helper()
	if *screenshots == "" {
		return
	}
	var out struct{ Data string }
	p.must(p.session, "Page.captureScreenshot", map[string]any{"format": "png"}, &out)
	picture, err := base64.StdEncoding.DecodeString(out.Data)
	if err == nil {
		err = os.MkdirAll(*screenshots, 0o755)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(*screenshots, name+".png"), picture, 0o600)
	}
	if err != nil {
		p.t.Error(err)
	}
}

// quoted returns a text as an expression.
func quoted(text string) string {
	encoded, err := json.Marshal(text)
	if err != nil {
		panic(err)
	}
	return string(encoded)
}
