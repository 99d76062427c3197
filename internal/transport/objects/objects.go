// Package objects reads which blocks a store holds from lists of its objects: a Mooncake store, or LMCache's.
//
// In: the list of the objects that a server has, of the master of a Mooncake store or of LMCache's coordinator, which gives it by HTTP; and the contents of blocks, of the
// workers that load from the store, or of other pools. Out: the blocks whose content is known, as package pool publishes them.
//
// The list is read rather than events: of what a master evicts or loses with a client it publishes no event (Mooncake 0.3.14), and
// versions built without ZeroMQ, as most packages are, publish none at all; LMCache's coordinator publishes none (0.5.6). A list is read every few seconds, and
// what differs from the list before is passed on. Each connection begins with all blocks, in an epoch of its own.
//
// Whatever the server sends, memory is bounded: keys are not kept, but for the names of some parts and namespaces, and blocks have the memory of Config.Limit.
package objects

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/pool"
)

const (
	// defaultInterval is the default of Config.Interval.
	defaultInterval = 2 * time.Second
	// loadShare is how many times as long as reading a list the time to the next one is, at least, up to longestWait.
	loadShare   = 20
	longestWait = time.Minute
	// listTimeout is how long reading a list may take, and headerTimeout until the answer begins.
	listTimeout   = 30 * time.Second
	headerTimeout = 10 * time.Second
	// maxListBytes is the size of the longest list: of ten million objects.
	maxListBytes = 1 << 30
	// attempts is how many lists in a row may fail before the connection counts as broken.
	attempts = 3
	// maxHeaderBytes is the size of the largest headers.
	maxHeaderBytes = 64 << 10
)

// Config is what a Receiver reads.
type Config struct {
	// Server is what is asked.
	Server Server
	// Address is the HOST:PORT of the HTTP server.
	Address string
	// Model is that of the blocks to read; empty: of any. Topic selects some: of Mooncake, those whose keys begin with it, which may then be of another
	// model; of LMCache, those that the instance of that id holds, and otherwise those that all instances share.
	Model, Topic string
	// Pool is the name of the pool that the store is to Contents.
	Pool     string
	Contents feed.Contents
	// Limit bounds the memory of blocks.
	Limit interface {
		Reserve(bytes int64) bool
		Release(bytes int64)
	}
	// Interval is the least time between two lists; default 2 s.
	Interval time.Duration
	Logger   *slog.Logger
}

// Server is a kind of server that has a list.
type Server interface {
	// learner returns whose contents are read.
	learner(c Config) feed.Learner
	texts() problemTexts
	// probe returns an error if no server answers with a list.
	probe(r *receiver) error
	// read passes on all objects. isPartial reports whether some may be missing.
	read(r *receiver) (isPartial bool, err error)
}

// receiver reads lists.
type receiver struct {
	*pool.Publisher
	Config
	client http.Client

	mu     sync.Mutex // guards blocks
	blocks *blocks

	// problem is that of the last list, and logged the one that was logged last.
	problem, logged string
}

// Subscribe reads the lists of a master, in the background, until the first cannot be read, or several in a row.
func Subscribe(c Config) transport.Receiver {
	c.Interval = cmp.Or(c.Interval, defaultInterval)
	r := &receiver{Publisher: pool.New(), Config: c, blocks: newBlocks(c.Topic, c.Model, c.Limit)}
	r.blocks.texts = c.Server.texts()
	dialer := net.Dialer{Timeout: transport.ConnectTimeout}
	r.client = http.Client{
		Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return dialer.DialContext(ctx, "tcp", c.Address)
			},
			MaxResponseHeaderBytes: maxHeaderBytes, ResponseHeaderTimeout: headerTimeout, DisableCompression: true, MaxIdleConns: 1,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Timeout:       listTimeout,
	}
	r.Go(r.run)
	return r
}

// run reads lists until they cannot be read, or receiving ends.
func (r *receiver) run() {
	err := r.Server.probe(r) // the blocks of all workers are read only if there is a server
	connected := false
	if err == nil {
		ctx, cancel := context.WithCancel(r.Context())
		begun, ended := make(chan struct{}), make(chan error, 1)
		learner := r.Server.learner(r.Config)
		learner.Stored, learner.Begun = r.learn, sync.OnceFunc(func() { close(begun) })
		go func() { ended <- r.Contents(ctx, r.Pool, learner) }()
		connected, err = r.read(begun, ended)
		cancel()
		<-ended
		r.blocks.close()
	}
	r.client.CloseIdleConnections()
	r.Disconnected(connected, err)
}

// read reads lists once the contents of blocks are known. connected reports whether it has read one. What it receives from ended it puts back.
func (r *receiver) read(begun <-chan struct{}, ended chan error) (connected bool, err error) {
	wait := begun
	for failures := 0; ; {
		select {
		case <-wait:
		case err := <-ended:
			ended <- err
			return connected, err
		case <-r.Context().Done():
			return connected, transport.ErrInterrupted
		}
		began := time.Now()
		isPartial, err := r.readList()
		next := max(r.Interval, min(longestWait, loadShare*time.Since(began)))
		switch {
		case err == nil && !r.pass(!connected, isPartial):
			return connected, transport.ErrInterrupted
		case err == nil:
			connected, failures = true, 0
		case !connected, failures+1 == attempts, r.Context().Err() != nil:
			return connected, err
		default:
			failures++
			next = r.Interval
			r.Logger.Warn("list of objects not read", "address", r.Address, "error", err)
		}
		timer := make(chan struct{})
		time.AfterFunc(next, func() { close(timer) })
		wait = timer
	}
}

// get returns the answer of a URL's path and query, which the caller must close, if it may have a list.
func (r *receiver) get(path, server string) (io.ReadCloser, error) {
	request, err := http.NewRequestWithContext(r.Context(), http.MethodGet, "http://"+r.Address+path, nil)
	if err != nil {
		return nil, err
	}
	response, err := r.client.Do(request)
	if err != nil {
		return nil, err
	}
	switch {
	case response.StatusCode != http.StatusOK:
		err = fmt.Errorf("%s has answered %s; want 200 OK from %s that serves", request.URL, response.Status, server)
	case response.ContentLength < 0 && len(response.TransferEncoding) == 0:
		err = fmt.Errorf("the answer of %s has no length, so that its end could be missing; want Content-Length or chunks", request.URL)
	case response.ContentLength > maxListBytes:
		err = errTooLong
	}
	if err != nil {
		return nil, errors.Join(err, response.Body.Close())
	}
	return response.Body, nil
}

var errTooLong = fmt.Errorf("the list of objects is too long; want at most %d bytes", maxListBytes)

// readList reads a list of objects into the blocks.
func (r *receiver) readList() (isPartial bool, err error) {
	r.mu.Lock()
	r.blocks.begin()
	r.mu.Unlock()
	return r.Server.read(r)
}

// learn records the contents of blocks.
func (r *receiver) learn(all []feed.Content, _ bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range all {
		of := &all[i]
		r.blocks.learn(of.Hash, of.Parent, of.HasParent, of.TokensHash, content{of.LoRA, of.Tokens})
	}
}

// pass passes on what a list has changed, and before, if it is the first, that there is a connection. It returns false if receiving ends.
func (r *receiver) pass(first, isPartial bool) bool {
	var stored []feed.Content
	var removed []uint64
	r.mu.Lock()
	problem := r.blocks.end(isPartial, func(b *block) { stored = append(stored, b.known()) }, func(b *block) { removed = append(removed, b.hash) })
	list, known := &r.blocks.list, len(r.blocks.all)
	r.mu.Unlock()
	if problem != "" && problem == r.problem && problem != r.logged { // one list may come before the workers' first events
		r.logged = problem
		r.Logger.Warn("no block of the store counts as held", "reason", problem)
	}
	r.problem = problem
	r.Logger.Debug("list of objects read", "objects", list.objects, "not_read", list.unread, "unknown_content", list.unknown,
		"blocks", known, "stored", len(stored), "removed", len(removed))
	if first {
		return r.Connected(stored)
	}
	return r.Remove(removed) && r.Store(stored)
}

// ReadGreeting sends a request over a connection, and returns nil if an HTTP server answers. The caller closes the connection when ctx ends.
func ReadGreeting(ctx context.Context, c net.Conn) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+c.RemoteAddr().String()+"/health", nil)
	if err != nil {
		return err
	}
	if err := request.Write(c); err != nil {
		return err
	}
	response, err := http.ReadResponse(bufio.NewReader(io.LimitReader(c, maxHeaderBytes)), request)
	if err != nil {
		return err
	}
	return response.Body.Close()
}
