package loglimit_test

import (
	"fmt"
	"testing"

	"github.com/kvcast/kvcast/internal/loglimit"
)

func TestKeysAreNewOnce(t *testing.T) {
	var keys loglimit.Keys
	for i := range loglimit.MaxKeys {
		if key := fmt.Sprint(i); !keys.IsNew(key) || keys.IsNew(key) {
			t.Errorf("key %s is not new exactly once", key)
		}
	}
	if !keys.IsNew("more") || !keys.IsNew("0") {
		t.Error("beyond the limit, no key is new again")
	}
}
