package kv

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// keysName is a file in the directory of a journal that has the keys of the registrations, a line each.
const keysName = "kvcast.registered"

// fileKeys are the keys in a file of a directory.
type fileKeys struct {
	dir  string
	sync func() error // makes the messages of the bucket survive a crash of the machine

	mu  sync.Mutex // guards all below
	set map[string]bool
}

// A file beyond maxKeysBytes, or with a key beyond maxKeyBytes, is damaged: it has more than all workers' names.
const (
	maxKeysBytes = 16 << 20
	maxKeyBytes  = 4 << 10
)

// readKeys reads the keys that must be there.
func readKeys(dir string, sync func() error) (*fileKeys, error) {
	k := &fileKeys{dir: dir, sync: sync, set: make(map[string]bool)}
	f, err := os.Open(k.name())
	if errors.Is(err, os.ErrNotExist) {
		return k, nil
	}
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(f, maxKeysBytes+1))
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	damaged := len(text) > maxKeysBytes
	for key := range strings.FieldsSeq(string(text)) {
		damaged = damaged || len(key) > maxKeyBytes
		k.set[key] = true
	}
	if damaged {
		return nil, fmt.Errorf("%s is damaged: it has more than %d bytes, or a line of more than %d; restore it, or delete it: then it is not noticed if files of registrations have lost some",
			k.name(), maxKeysBytes, maxKeyBytes)
	}
	return k, nil
}

func (k *fileKeys) name() string { return filepath.Join(k.dir, keysName) }

func (k *fileKeys) stored(key string) error { return errors.Join(k.sync(), k.require(key, true)) }

func (k *fileKeys) removing(key string) error { return k.require(key, false) }

func (k *fileKeys) required(key string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.set[key]
}

// require records whether a key must be there.
func (k *fileKeys) require(key string, there bool) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.set[key] == there {
		return nil
	}
	set := maps.Clone(k.set)
	if set[key] = true; !there {
		delete(set, key)
	}
	f, err := os.CreateTemp(k.dir, keysName)
	if err != nil {
		return err
	}
	_, err = f.WriteString(strings.Join(slices.Sorted(maps.Keys(set)), "\n") + "\n")
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), k.name())
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	k.set = set
	return nil
}

func (k *fileKeys) missing(prefix string, subjects map[string]uint64) []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	var keys []string
	for key := range k.set {
		if _, ok := subjects[prefix+key]; !ok {
			keys = append(keys, key)
		}
	}
	return keys
}
