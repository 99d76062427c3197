package docs_test

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/harness"
)

// search looks for a word as a person does, and then opens REPORT with the addresses of what was found and what the page was not allowed
// to load.
const search = `<script>
const refused = [];
addEventListener("securitypolicyviolation", e => refused.push(e.blockedURI + " by " + e.violatedDirective));
addEventListener("load", () => setInterval(() => {
	const box = [...document.querySelectorAll("*")].map(e => e.shadowRoot?.querySelector("input[role=combobox]")).find(e => e);
	if (!box) {
		document.querySelector("label[for=__search]").click();
		return;
	}
	if (box.value == "") {
		box.value = "deregisterworker";
		box.dispatchEvent(new InputEvent("input", {bubbles: true}));
	}
	const found = [...box.getRootNode().querySelectorAll("[role=listbox] a")].map(e => e.href);
	if (found.length > 0) location = "REPORT?" + new URLSearchParams({found: found.join("\n"), refused: refused.join("\n")});
}, 100));
</script></head>`

// TestSearch searches in headless Chromium: in files, which are opened without a server, and on a server, with a policy that allows no other host.
func TestSearch(t *testing.T) {
	testclass.Packaging(t)
	dir, chromium := t.TempDir(), ""
	if err := os.CopyFS(dir, os.DirFS(site(t))); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"google-chrome", "chromium-browser", "chromium"} {
		if path, err := exec.LookPath(name); err == nil {
			chromium = path
		}
	}
	if chromium == "" {
		t.Skip("Chromium is not installed: run apt-get install chromium")
	}
	reports := make(chan url.Values, 10)
	mux := http.NewServeMux()
	mux.HandleFunc("/report", func(_ http.ResponseWriter, r *http.Request) { reports <- r.URL.Query() })
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Security-Policy", "default-src 'self' 'unsafe-inline' data: blob:")
		http.FileServer(http.Dir(dir)).ServeHTTP(w, r)
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)

	index := filepath.Join(dir, "index.html")
	text, err := os.ReadFile(index)
	if err == nil {
		text = []byte(strings.Replace(string(text), "</head>", strings.ReplaceAll(search, "REPORT", server.URL+"/report"), 1))
		err = os.WriteFile(index, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, base := range []string{"file://" + dir, server.URL} {
		cmd := exec.CommandContext(harness.Context(t), chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
			"--disable-background-networking", "--disable-extensions", "--user-data-dir="+t.TempDir(), "--remote-debugging-port=0", base+"/index.html")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		select {
		case r := <-reports:
			found := strings.Fields(r.Get("found"))
			if len(found) == 0 || !strings.HasPrefix(found[0], base+"/") || !strings.Contains(r.Get("found"), "/worker_service.proto.html") {
				t.Errorf("%s: found %q, want the contract's page of DeregisterWorker", base, found)
			}
			if r.Get("refused") != "" {
				t.Errorf("%s: other hosts were called: %s", base, r.Get("refused"))
			}
		case <-harness.Context(t).Done():
			t.Errorf("%s: no page was found", base)
		}
		_ = cmd.Process.Signal(syscall.SIGTERM) // its children end too
		_ = cmd.Wait()
	}
}
