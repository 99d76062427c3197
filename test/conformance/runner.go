package conformance

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvcast/kvcast/test/harness"
)

// Limit is how long a client may take for a script. It is far above what a busy machine needs.
const Limit = 2 * time.Minute

// Runner is a client under test: it reads jobs, one in a line, and reports what it did in lines of JSON, the last of which is {"end": true}.
type Runner struct {
	jobs  io.Writer
	lines chan []byte // closed when the client has ended
}

// NewRunner returns a client that reads jobs and writes lines.
func NewRunner(jobs io.Writer, lines io.Reader) *Runner {
	r := &Runner{jobs: jobs, lines: make(chan []byte)}
	go func() {
		defer close(r.lines)
		for s := bufio.NewScanner(lines); s.Scan(); {
			r.lines <- bytes.Clone(s.Bytes())
		}
	}()
	return r
}

// job is what a client is asked to do.
type job struct {
	// Name is that of the script.
	Name string `json:"name"`
	// Targets are the addresses of the servers, separated by commas.
	Targets string `json:"targets"`
	// CAFile has the certificate in PEM by which the servers are known; empty: no TLS.
	CAFile string `json:"ca_file,omitempty"`
	// Token is sent with each call; empty: none.
	Token string `json:"token,omitempty"`
	// ClientID is what the client calls itself; empty: it does not.
	ClientID string `json:"client_id,omitempty"`
	// Calls are what to do, one after the other.
	Calls []json.RawMessage `json:"calls"`
}

// errClient means that the client cannot be used any more.
var errClient = errors.New("the client has ended, or does not answer")

// Play plays a script. It returns what is wrong; none: the client has passed. After an error, the client cannot be used any more.
func (r *Runner) Play(t *testing.T, s *Script) (wrong []string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Limit)
	defer cancel()
	p := &play{script: s, reported: make(chan struct{})}
	j := job{Name: s.Name, Token: s.Token, ClientID: s.ClientID, Calls: s.Calls}
	creds := insecure.NewCredentials()
	if s.TLS {
		ca := harness.NewAuthority(t)
		j.CAFile = ca.File
		if creds, err = credentials.NewServerTLSFromFile(ca.Issue("kvcast", "localhost")); err != nil {
			t.Fatal(err)
		}
	}
	var targets []string
	for i := range s.Servers {
		server, err := p.listen(i, creds)
		if err != nil {
			t.Fatal(err)
		}
		defer server.stop()
		targets = append(targets, server.listener.Addr().String())
	}
	j.Targets = strings.Join(targets, ",")
	text, err := json.Marshal(j)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.jobs.Write(append(text, '\n')); err != nil {
		return nil, fmt.Errorf("%w: %w", errClient, err)
	}
	got, err := r.collect(ctx, p)
	if err != nil {
		return append(p.complaints(), "it has reported only:\n"+strings.Join(got, "\n")), err
	}
	want := make([]string, 0, len(s.Want))
	for _, w := range s.Want {
		text, err := canonical(w)
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, text)
	}
	if s.Unordered {
		slices.Sort(got)
		slices.Sort(want)
	}
	return append(p.complaints(), difference(got, want)...), nil
}

// collect returns the lines that the client reports.
func (r *Runner) collect(ctx context.Context, p *play) (got []string, err error) {
	for {
		select {
		case text, ok := <-r.lines:
			if !ok {
				return got, errClient
			}
			line, err := canonical(text)
			if err != nil {
				return append(got, string(text)), fmt.Errorf("%w: the line is not JSON: %w", errClient, err)
			}
			if line == `{"end":true}` {
				return got, nil
			}
			got = append(got, line)
			p.report()
		case <-ctx.Done():
			return got, errClient
		}
	}
}

// canonical returns JSON without spaces, with sorted keys.
func canonical(text []byte) (string, error) {
	var value any
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	if err := d.Decode(&value); err != nil {
		return "", err
	}
	out, err := json.Marshal(value)
	return string(out), err
}

// difference describes how lines differ; none: they do not.
func difference(got, want []string) (out []string) {
	for i := range max(len(got), len(want)) {
		g, w := "nothing", "nothing"
		if i < len(got) {
			g = got[i]
		}
		if i < len(want) {
			w = want[i]
		}
		if g != w {
			out = append(out, fmt.Sprintf("line %d\n   got %s\n  want %s", i+1, g, w))
		}
	}
	return out
}

// Drain waits until the client has ended, and drops what it reports.
func (r *Runner) Drain() {
	for range r.lines {
	}
}
