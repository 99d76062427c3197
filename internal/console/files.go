package console

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"mime"
	"net/http"
	"path"
	"strconv"
)

//go:embed static
var static embed.FS

// file is a file of the page. A browser asks each time whether it has changed, as it does with another version of kvcast.
type file struct {
	kind, tag string
	text      []byte
}

// newFiles returns the files of the page by name.
func newFiles() map[string]*file {
	all := make(map[string]*file)
	entries, err := static.ReadDir("static")
	if err != nil {
		panic(err) // they are embedded
	}
	for _, e := range entries {
		text, err := static.ReadFile(path.Join("static", e.Name()))
		if err != nil {
			panic(err)
		}
		sum := sha256.Sum256(text)
		all[e.Name()] = &file{mime.TypeByExtension(path.Ext(e.Name())), `"` + hex.EncodeToString(sum[:16]) + `"`, text}
	}
	return all
}

// ServeHTTP implements http.Handler.
func (f *file) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Cache-Control", "no-cache")
	h.Set("ETag", f.tag)
	if r.Header.Get("If-None-Match") == f.tag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	h.Set("Content-Type", f.kind)
	h.Set("Content-Length", strconv.Itoa(len(f.text)))
	_, _ = w.Write(f.text) // the client may be gone
}
