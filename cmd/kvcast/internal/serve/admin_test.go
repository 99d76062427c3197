package serve

import (
	"bufio"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/test/bufconn"
)

// TestBodiesOfTheAdminPortAreTimed has a client that announces a body and sends none, to a path that reads none.
func TestBodiesOfTheAdminPortAreTimed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := bufconn.Listen(1 << 10)
		server := &http.Server{Handler: limitBodyTime(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "ok")
		})), ReadHeaderTimeout: time.Minute, IdleTimeout: time.Hour}
		served := make(chan error, 1)
		go func() { served <- server.Serve(l) }()
		for _, tt := range []struct {
			request string
			open    time.Duration // until the server closes the connection
		}{
			{"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n", adminBodyTimeout},
			{"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", adminBodyTimeout},
			{"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", time.Hour},
		} {
			c, err := l.Dial()
			if err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			if _, err := io.WriteString(c, tt.request); err != nil {
				t.Fatal(err)
			}
			r := bufio.NewReader(c)
			if response, err := http.ReadResponse(r, nil); err != nil || response.StatusCode != http.StatusOK { //nolint:bodyclose // the connection is closed
				t.Fatalf("%s: got %v, error %v", strings.Fields(tt.request)[1], response, err)
			}
			_, _ = io.Copy(io.Discard, r) // until the server closes the connection
			if took := time.Since(began); took != tt.open {
				t.Errorf("%q: the connection was open for %v, want %v", tt.request, took, tt.open)
			}
			_ = c.Close()
		}
		if err := server.Close(); err != nil {
			t.Error(err)
		}
		<-served
	})
}
