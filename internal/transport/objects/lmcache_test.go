package objects_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/objects"
	"github.com/kvcast/kvcast/internal/transport/pool/pooltest"
)

// object is an object in the form of LMCache's coordinator.
type object map[string]any

// chunk is the part of a block of Chain that a rank has, in memory that all instances share.
func chunk(hash uint64, rank int) object {
	return object{
		"key":        object{"chunk_hash_hex": fmt.Sprintf("%048x%016x", 7, hash), "model_name": "m", "kv_rank": rank, "object_group_id": 0, "cache_salt": ""},
		"placements": []object{{"instance_id": "i", "tier": "l1", "shared": false}, {"instance_id": "i", "tier": "l2", "shared": true}},
		"num_tokens": 16,
	}
}

// with returns an object with another value in its key.
func (o object) with(name string, value any) object {
	o["key"].(object)[name] = value
	return o
}

// coordinator is an HTTP server that has objects. before is called before each page, which it may fail.
type coordinator struct {
	*httptest.Server
	mu     sync.Mutex
	all    []object
	before func(w http.ResponseWriter, offset, limit int, instance string) bool
}

func newCoordinator(t *testing.T) *coordinator {
	c := &coordinator{before: func(http.ResponseWriter, int, int, string) bool { return true }}
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c.mu.Lock()
		defer c.mu.Unlock()
		offset, _ := strconv.Atoi(r.URL.Query().Get("offset"))
		limit, err := strconv.Atoi(r.URL.Query().Get("limit"))
		if r.URL.Path != "/directory/keys" || err != nil || limit < 1 || limit > 10000 {
			http.NotFound(w, r)
			return
		}
		if c.before(w, offset, limit, r.URL.Query().Get("instance_id")) {
			from := min(offset, len(c.all))
			_ = json.NewEncoder(w).Encode(object{"total": len(c.all), "keys": c.all[from:min(from+limit, len(c.all))]})
		}
	}))
	t.Cleanup(c.Close)
	return c
}

func (c *coordinator) do(change func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change()
}

// set replaces the objects by those of the first blocks of the chain, of two ranks, and others.
func (c *coordinator) set(n uint64, others ...object) {
	c.do(func() {
		c.all = others
		for hash := uint64(1); hash <= n; hash++ {
			c.all = append(c.all, chunk(hash, 0), chunk(hash, 1))
		}
	})
}

func (c *coordinator) read(t *testing.T, topic string, contents feed.Contents) *pooltest.Reader {
	t.Helper()
	return newReader(t, objects.Config{
		Server: objects.LMCacheOf(100, 1<<20, 2000), Address: c.Listener.Addr().String(), Model: "m", Topic: topic, Interval: time.Millisecond, Contents: contents,
	})
}

// TestDirectoryIsFollowed has a directory of several pages, with objects that do not count.
func TestDirectoryIsFollowed(t *testing.T) {
	t.Parallel()
	c := newCoordinator(t)
	unshared := chunk(50, 0)
	unshared["placements"] = []object{{"shared": false}}
	others := []object{
		chunk(601, 0).with("cache_salt", "s"), chunk(601, 1).with("cache_salt", "s"), chunk(602, 0).with("model_name", "n"),
		chunk(603, 0).with("model_name", strings.Repeat("n", 3000)), chunk(603, 0).with("chunk_hash_hex", "zz"), chunk(604, 0).with("chunk_hash_hex", "00"), unshared,
	}
	c.set(600, others...)
	r := c.read(t, "", pooltest.Contents(pooltest.Chain(610), nil))
	r.Want(600)
	c.set(590, append(others, chunk(591, 0))...) // of which a part is missing
	r.Want(590)
	c.set(0, others...)
	r.Want(0)
	c.set(2)
	r.Want(2)
	if r.Gone != 600 {
		t.Errorf("%d blocks were removed, want 600", r.Gone)
	}
}

// TestPagesThatChangeLackNothing has a directory that loses an object between two pages, so that the second lacks one that is there.
func TestPagesThatChangeLackNothing(t *testing.T) {
	t.Parallel()
	c := newCoordinator(t)
	c.set(600)
	r := c.read(t, "", pooltest.Contents(pooltest.Chain(600), nil))
	r.Want(600)
	shrinks := true
	c.do(func() {
		c.before = func(_ http.ResponseWriter, offset, _ int, _ string) bool {
			if offset > 0 && shrinks {
				shrinks = false
				c.all = c.all[2:] // block 1: in the second page, two objects take the place of those of block 51, which no page has
			}
			return true
		}
	})
	for r.Held[1] != 0 {
		if err := r.Read(); err != nil {
			t.Fatal(err)
		}
	}
	if len(r.Held) != 599 || r.Gone != 1 {
		t.Errorf("%d blocks are held, and %d were removed; want 599 and 1", len(r.Held), r.Gone)
	}
}

// TestInstance has the objects of one instance, in memory of its own.
func TestInstance(t *testing.T) {
	t.Parallel()
	c := newCoordinator(t)
	own := chunk(1, 0)
	own["placements"] = []object{{"instance_id": "i", "tier": "l1", "shared": false}}
	c.do(func() {
		c.all = []object{own}
		c.before = func(_ http.ResponseWriter, _, _ int, instance string) bool {
			if instance != "i" {
				t.Errorf("instance %q", instance)
			}
			return true
		}
	})
	c.read(t, "i", func(_ context.Context, pool string, l feed.Learner) error {
		if l.Tier != kvblock.TierExternal || l.PoolsOf != "m" {
			t.Errorf("%+v of %q", l, pool)
		}
		return pooltest.Contents(pooltest.Chain(2), nil)(t.Context(), pool, l)
	}).Want(1)
}

func TestErrorsOfACoordinator(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer func(w http.ResponseWriter, offset, limit int) bool
		want   string
	}{
		"another server": {func(w http.ResponseWriter, _, _ int) bool { w.WriteHeader(http.StatusNotFound); return false }, "404 Not Found; want 200 OK from a coordinator of LMCache"},
		"no JSON":        {func(w http.ResponseWriter, _, _ int) bool { _, _ = io.WriteString(w, "<html>"); return false }, "read a page of the list: invalid character '<'"},
		"another form": {func(w http.ResponseWriter, _, _ int) bool {
			_, _ = io.WriteString(w, `{"keys":[{"key":1}]}`)
			return false
		}, "read a page of the list: json: cannot unmarshal number"},
		"a list":          {func(w http.ResponseWriter, _, _ int) bool { _, _ = io.WriteString(w, "[]"); return false }, "read a page of the list: got [, want {"},
		"objects by name": {func(w http.ResponseWriter, _, _ int) bool { _, _ = io.WriteString(w, `{"keys":{}}`); return false }, "read a page of the list: got {, want ["},
		"no end of it":    {func(w http.ResponseWriter, _, _ int) bool { _, _ = io.WriteString(w, `{"keys":[]`); return false }, "read a page of the list: EOF"},
		"a page too long": {func(w http.ResponseWriter, _, _ int) bool {
			_, _ = io.WriteString(w, strings.Repeat(" ", 1<<20+1))
			return false
		}, "a page of the list is too long; want at most 1048576 bytes"},
		"more than asked for": {func(w http.ResponseWriter, _, limit int) bool {
			_ = json.NewEncoder(w).Encode(object{"keys": make([]object, limit+1)})
			return false
		}, "read a page of the list: there are more objects than asked for; want at most 1"},
		"no end": {func(w http.ResponseWriter, _, limit int) bool {
			_, _ = io.WriteString(w, `{"keys":[{}`+strings.Repeat(",{}", limit-1)+"]}")
			return false
		}, "the list of objects is too long; want fewer than 2000"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := newCoordinator(t)
			server.before = func(w http.ResponseWriter, offset, limit int, _ string) bool { return c.answer(w, offset, limit) }
			if e := server.read(t, "", pooltest.Contents(nil, nil)).Last(); e.Kind != transport.Failed || !strings.Contains(fmt.Sprint(e.Err), c.want) {
				t.Errorf("%+v, want %s", e, c.want)
			}
		})
	}
}
