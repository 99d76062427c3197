package objects

import (
	"bytes"
	"errors"
	"io"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
)

const (
	// maxKeyBytes is the most bytes of a key, or of a model's name. Longer ones are of no block.
	maxKeyBytes = 2 << 10
	// readBytes is how much of a list is read before it is looked at.
	readBytes = 64 << 10
)

// Mooncake is the HTTP server of a Mooncake master. It answers with a line for each object, its key.
var Mooncake Server = mooncake{}

type mooncake struct{}

var mooncakeTexts = problemTexts{
	several: "choose one with topic, the beginning of its keys",
	foreign: "set topic, the beginning of the keys",
	none:    "none of %d objects is a block that vLLM's MooncakeStoreConnector or SGLang's HiCache has stored, with a key that begins with topic",
	unknown: "no worker that names the pool in its pools was seen to store any block of %d objects: do all have one PYTHONHASHSEED?",
}

func (mooncake) texts() problemTexts { return mooncakeTexts }

// learner implements Server: workers that load from the store have its blocks in device memory. What connectors tell of lower tiers may name neither adapter nor cache salt.
func (mooncake) learner(Config) feed.Learner { return feed.Learner{Tier: kvblock.TierDevice} }

func (mooncake) request(r *receiver) (io.ReadCloser, error) {
	return r.get("/get_all_keys", "a Mooncake master")
}

// probe implements Server.
func (m mooncake) probe(r *receiver) error {
	body, err := m.request(r)
	if err == nil {
		err = body.Close()
	}
	return err
}

// read implements Server. A longer key than maxKeyBytes is of no block.
func (m mooncake) read(r *receiver) (isPartial bool, err error) {
	from, err := m.request(r)
	if err != nil {
		return false, err
	}
	defer func() { _ = from.Close() }()
	buffer, read := make([]byte, readBytes), 0
	for kept, tooLong := 0, false; ; {
		n, err := from.Read(buffer[kept:])
		if read += n; read > maxListBytes {
			return false, errTooLong
		}
		rest := buffer[:kept+n]
		r.mu.Lock()
		for {
			line, after, ended := bytes.Cut(rest, []byte("\n"))
			if !ended {
				break
			}
			if !tooLong && len(line) <= maxKeyBytes {
				r.blocks.mooncakeObject(line)
			}
			rest, tooLong = after, false
		}
		if tooLong = tooLong || len(rest) > maxKeyBytes; tooLong {
			rest = nil
		}
		if errors.Is(err, io.EOF) && len(rest) > 0 {
			r.blocks.mooncakeObject(rest)
		}
		r.mu.Unlock()
		switch kept = copy(buffer, rest); {
		case errors.Is(err, io.EOF):
			return false, nil
		case err != nil:
			return false, err
		}
	}
}

// mooncakeObject adds an object of a Mooncake store to the list: of the topic, if its key begins with it, or of the model, if there is one.
func (b *blocks) mooncakeObject(text []byte) {
	k, ok := parse(text)
	switch {
	case !ok || !bytes.HasPrefix(text, []byte(b.topic)):
		b.unread()
	case b.topic == "" && b.model != "" && !b.list.namespaces[string(k.namespace)] && !k.isOf(b.model):
		b.foreign(&k)
	default:
		b.object(&k)
	}
}
