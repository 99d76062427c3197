package console

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"net/http"
	"path"
	"time"
)

//go:embed static
var static embed.FS

// newFiles returns the files of the page by name. A browser asks each time whether one has changed, as it does with another version of
// kvcast.
func newFiles() map[string]http.HandlerFunc {
	all := make(map[string]http.HandlerFunc)
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
		tag := `"` + hex.EncodeToString(sum[:16]) + `"`
		all[e.Name()] = func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Cache-Control", "no-cache")
			w.Header().Set("ETag", tag)
			http.ServeContent(w, r, e.Name(), time.Time{}, bytes.NewReader(text))
		}
	}
	return all
}
