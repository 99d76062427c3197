package consolidate

import "testing"

// TestKeysOfScopesDiffer draws sequence hashes whose differences are those of the scopes, since engines choose both.
func TestKeysOfScopesDiffer(t *testing.T) {
	for _, factor := range []uint64{1, 1 << 32, 0x9e3779b97f4a7c15} {
		seen := make(map[uint64]bool)
		for scope := range uint32(100) {
			seen[content{scope: scope, sequence: 1<<60 - uint64(scope)*factor}.key()] = true
		}
		if len(seen) < 100 {
			t.Errorf("factor %x: 100 contents have %d keys", factor, len(seen))
		}
	}
}
