package objects

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strconv"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
)

const (
	// pageObjects is how many objects a page has: the most that a coordinator allows. pageBytes is the size of the largest page.
	pageObjects = 10_000
	pageBytes   = 64 << 20
	// maxObjects is more than the longest list has.
	maxObjects = 10_000_000
	// minChunkHash is the length of the shortest hash of a chunk, in bytes.
	minChunkHash = 8
)

// LMCache is LMCache's coordinator (lmcache 0.5.6). It answers with pages of the objects that its servers have told it of, each with where they are. An object is the part of a
// chunk of one rank and object group.
var LMCache Server = lmcache{pageObjects, maxObjects}

// lmcache has pages of a number of objects, and lists of fewer than another.
type lmcache struct{ page, most int }

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
	Total int `json:"total"`
	Keys  []struct {
		Key struct {
			ChunkHash string `json:"chunk_hash_hex"`
			Model     string `json:"model_name"`
			Rank      int64  `json:"kv_rank"`
			Group     uint32 `json:"object_group_id"`
			Salt      string `json:"cache_salt"`
		} `json:"key"`
		Placements []placement `json:"placements"`
	} `json:"keys"`
}

// placement is where an object is.
type placement struct {
	Shared bool `json:"shared"` // by all instances
}

// request requests a page of objects.
func (lmcache) request(r *receiver, offset, limit int) (*page, error) {
	query := url.Values{"offset": {strconv.Itoa(offset)}, "limit": {strconv.Itoa(limit)}}
	if r.Topic != "" {
		query.Set("instance_id", r.Topic)
	}
	body, err := r.get("/directory/keys?"+query.Encode(), "a coordinator of LMCache")
	if err != nil {
		return nil, err
	}
	defer func() { _ = body.Close() }()
	p := new(page)
	text, err := io.ReadAll(io.LimitReader(body, pageBytes+1))
	switch {
	case err != nil:
		return nil, err
	case len(text) > pageBytes:
		return nil, fmt.Errorf("a page of the list is too long; want at most %d bytes", pageBytes)
	}
	if err := json.Unmarshal(text, p); err != nil {
		return nil, fmt.Errorf("a page of the list is no JSON that is understood: %w", err)
	}
	if len(p.Keys) > limit {
		return nil, fmt.Errorf("a page of the list has %d objects; want at most %d", len(p.Keys), limit)
	}
	return p, nil
}

// probe implements Server.
func (m lmcache) probe(r *receiver) error {
	_, err := m.request(r, 0, 1)
	return err
}

// read implements Server. Pages of a list that changes may lack objects.
func (m lmcache) read(r *receiver) (isPartial bool, err error) {
	total := -1
	for offset := 0; ; offset += m.page {
		p, err := m.request(r, offset, m.page)
		if err != nil {
			return false, err
		}
		isPartial = isPartial || total >= 0 && p.Total != total
		total = p.Total
		r.mu.Lock()
		m.objects(r, p)
		r.mu.Unlock()
		switch {
		case len(p.Keys) < m.page:
			return isPartial, nil
		case offset+m.page >= m.most:
			return false, fmt.Errorf("the list of objects is too long; want fewer than %d", m.most)
		}
	}
}

// objects adds the objects of a page to the list. r.mu must be held.
func (m lmcache) objects(r *receiver, p *page) {
	for i := range p.Keys {
		object := &p.Keys[i]
		digest, err := hex.DecodeString(object.Key.ChunkHash)
		isShared := slices.ContainsFunc(object.Placements, func(p placement) bool { return p.Shared })
		k := key{namespace: []byte(object.Key.Model), shard: fmt.Appendf(nil, "%d/%d", object.Key.Rank, object.Key.Group), group: object.Key.Group, isPart: true}
		switch {
		case err != nil || len(digest) < minChunkHash, object.Key.Salt != "", r.Topic == "" && !isShared:
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
