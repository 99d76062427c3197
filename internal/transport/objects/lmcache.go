package objects

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
)

const (
	// pageObjects is how many objects a page has: the most that a coordinator allows. pageBytes is the size of the largest page.
	pageObjects = 10_000
	pageBytes   = 64 << 20
	// maxObjects is more than the longest list has.
	maxObjects = 10_000_000
	// longestList is how long reading all pages may take.
	longestList = 2 * time.Minute
	// minChunkHash is the length of the shortest hash of a chunk, in bytes.
	minChunkHash = 8
)

// LMCache is LMCache's coordinator (lmcache 0.5.6). It answers with pages of the objects that its servers have told it of, each with where they are. An object is the part of a
// chunk of one rank and object group.
var LMCache Server = lmcache{pageObjects, pageBytes, maxObjects}

// lmcache has pages of a number of objects and at most so many bytes, and lists of fewer than most objects.
type lmcache struct{ page, bytes, most int }

func (lmcache) texts() problemTexts {
	return problemTexts{
		foreign: "set the worker's model",
		none:    "none of %d objects without a cache salt is in memory that all instances share, or of the instance that topic names",
		unknown: "no pool of the model was seen to store any chunk of %d objects: read the servers of LMCache that have them, lmcache://HOST:PORT",
	}
}

// learner implements Server: the servers of LMCache store chunks first, which then move on.
func (lmcache) learner(c Config) feed.Learner {
	return feed.Learner{Tier: kvblock.TierExternal, PoolsOf: c.Model}
}

// page is a page of a list.
type page struct {
	total   int
	objects []lmcacheObject
}

// lmcacheObject is an object of a page.
type lmcacheObject struct {
	Key struct {
		ChunkHash string `json:"chunk_hash_hex"`
		Model     string `json:"model_name"`
		Rank      int64  `json:"kv_rank"`
		Group     uint32 `json:"object_group_id"`
		Salt      string `json:"cache_salt"`
	} `json:"key"`
	Placements []placement `json:"placements"`
}

// placement is where an object is.
type placement struct {
	Shared bool `json:"shared"` // by all instances
}

// request requests a page of objects.
func (m lmcache) request(r *receiver, offset, limit int) (*page, error) {
	query := url.Values{"offset": {strconv.Itoa(offset)}, "limit": {strconv.Itoa(limit)}}
	if r.Topic != "" {
		query.Set("instance_id", r.Topic)
	}
	body, err := r.get("/directory/keys?"+query.Encode(), "a coordinator of LMCache")
	if err != nil {
		return nil, err
	}
	defer func() { _ = body.Close() }()
	limited := &io.LimitedReader{R: body, N: int64(m.bytes) + 1}
	p, err := readPage(json.NewDecoder(limited), limit)
	switch {
	case limited.N == 0:
		return nil, fmt.Errorf("a page of the list is too long; want at most %d bytes", m.bytes)
	case err != nil:
		return nil, fmt.Errorf("read a page of the list: %w", err)
	}
	return p, nil
}

// readPage reads a page of at most limit objects. Others take no memory.
func readPage(d *json.Decoder, limit int) (*page, error) {
	p := new(page)
	if err := expect(d, json.Delim('{')); err != nil {
		return nil, err
	}
	for d.More() {
		name, err := d.Token()
		switch {
		case err != nil:
			return nil, err
		case name == "total":
			err = d.Decode(&p.total)
		case name == "keys":
			err = p.readObjects(d, limit)
		default:
			err = d.Decode(new(json.RawMessage))
		}
		if err != nil {
			return nil, err
		}
	}
	return p, expect(d, json.Delim('}'))
}

func (p *page) readObjects(d *json.Decoder, limit int) error {
	if err := expect(d, json.Delim('[')); err != nil {
		return err
	}
	for d.More() {
		if len(p.objects) == limit {
			return fmt.Errorf("there are more objects than asked for; want at most %d", limit)
		}
		p.objects = append(p.objects, lmcacheObject{})
		if err := d.Decode(&p.objects[len(p.objects)-1]); err != nil {
			return err
		}
	}
	return expect(d, json.Delim(']'))
}

// expect reads a token, and returns an error if it is another one.
func expect(d *json.Decoder, want json.Delim) error {
	got, err := d.Token()
	if err == nil && got != want {
		err = fmt.Errorf("got %v, want %v", got, want)
	}
	return err
}

// probe implements Server.
func (m lmcache) probe(r *receiver) error {
	_, err := m.request(r, 0, 1)
	return err
}

// read implements Server. Pages of a list that changes may lack objects.
func (m lmcache) read(r *receiver) (isPartial bool, err error) {
	total, began := -1, time.Now()
	for offset := 0; ; offset += m.page {
		p, err := m.request(r, offset, m.page)
		if err != nil {
			return false, err
		}
		isPartial = isPartial || total >= 0 && p.total != total
		total = p.total
		r.mu.Lock()
		m.objects(r, p)
		r.mu.Unlock()
		switch {
		case len(p.objects) < m.page:
			return isPartial, nil
		case time.Since(began) > longestList:
			return false, fmt.Errorf("reading the list takes more than %v", longestList)
		case offset+m.page >= m.most:
			return false, fmt.Errorf("the list of objects is too long; want fewer than %d", m.most)
		}
	}
}

// objects adds the objects of a page to the list. r.mu must be held.
func (m lmcache) objects(r *receiver, p *page) {
	for i := range p.objects {
		object := &p.objects[i]
		digest, err := hex.DecodeString(object.Key.ChunkHash)
		isShared := slices.ContainsFunc(object.Placements, func(p placement) bool { return p.Shared })
		k := key{namespace: []byte(object.Key.Model), shard: fmt.Appendf(nil, "%d/%d", object.Key.Rank, object.Key.Group), group: object.Key.Group, isPart: true}
		switch {
		case err != nil || len(digest) < minChunkHash, len(object.Key.Model) > maxKeyBytes, object.Key.Salt != "", r.Topic == "" && !isShared:
			r.blocks.unread()
		case object.Key.Model != r.Model:
			r.blocks.foreign(&k)
		default:
			for _, b := range digest[len(digest)-minChunkHash:] {
				k.hash = k.hash<<8 | uint64(b)
			}
			r.blocks.object(&k)
		}
	}
}
