package loglimit

import "sync"

// MaxKeys bounds the keys that Keys has.
const MaxKeys = 1024

// Keys remembers what was logged, so that what many requests meet is logged once. If there are more than MaxKeys, all may be logged again. The zero value has none. Keys is safe
// for concurrent use.
type Keys struct {
	mu     sync.Mutex // guards logged
	logged map[string]struct{}
}

// IsNew adds a key, and reports whether it was missing.
func (k *Keys) IsNew(key string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, ok := k.logged[key]; ok {
		return false
	}
	if k.logged == nil || len(k.logged) >= MaxKeys {
		k.logged = make(map[string]struct{})
	}
	k.logged[key] = struct{}{}
	return true
}
