package config_test

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvcast/kvcast/ingest/config"
)

func TestRemoveSocketRemovesSocketsOnly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	if err := config.RemoveSocket(path); err != nil {
		t.Errorf("no file: %v", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := config.RemoveSocket(path); err != nil {
		t.Errorf("socket: %v", err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := config.RemoveSocket(path); err == nil || err.Error() != path+" exists, and is not a socket" {
		t.Errorf("file: %v", err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Errorf("the file is removed: %v", err)
	}
}
