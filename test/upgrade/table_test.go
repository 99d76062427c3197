package upgrade_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// table is the rows of a table of what was measured.
type table struct {
	mu   sync.Mutex // guards all below
	rows []string
}

var measured table

const tableHead = `| journal | change | same epoch | snapshots of three routers | longest time without an entry of a worker, one address | two addresses |
|---|---|---|---|---|---|
`

func (t *table) add(row string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.rows = append(t.rows, row)
}

// write writes the table to a file, unless it is empty.
func (t *table) write(name string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.rows == nil {
		return nil
	}
	slices.Sort(t.rows)
	text := tableHead + strings.Join(t.rows, "\n") + "\n"
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return fmt.Errorf("write the table: %w", err)
	}
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		return fmt.Errorf("write the table: %w", err)
	}
	return nil
}
