package embedded_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/kvcast/kvcast/internal/journal/jetstream/embedded"
)

const positionName = "kvcast.position"

// openPosition returns the position that a start finds in a directory.
func openPosition(t *testing.T, dir string) *embedded.Position {
	t.Helper()
	p, err := embedded.OpenPosition(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Abandon)
	return p
}

// setPosition returns a position that is set.
func setPosition(t *testing.T, dir string, newest, purged uint64) *embedded.Position {
	t.Helper()
	p := openPosition(t, dir)
	if err := p.Set("epoch", newest, purged); err != nil {
		t.Fatal(err)
	}
	return p
}

// wantPosition starts in a directory, and checks what it finds.
func wantPosition(t *testing.T, dir string, newest uint64) {
	t.Helper()
	p := openPosition(t, dir)
	if err := p.Doubt("epoch"); err != nil || p.Newest() != newest {
		t.Errorf("got %d, %v, want %d", p.Newest(), err, newest)
	}
}

func wantDoubt(t *testing.T, dir, want string) {
	t.Helper()
	p := openPosition(t, dir)
	name := filepath.Join(dir, positionName)
	for range 2 {
		if err := p.Doubt("epoch"); err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), name) {
			t.Errorf("got %v, want a doubt that has %q and begins with %s", err, want, name)
		}
	}
	if err := p.Check(1, 1000); err == nil {
		t.Error("a position in doubt is not checked")
	}
	p.Forget()
	if err := p.Check(1, 0); err != nil {
		t.Errorf("after Forget: got %v", err)
	}
}

func TestPositionNoticesLostEntries(t *testing.T) {
	p := setPosition(t, t.TempDir(), 10, 3)
	for _, tt := range []struct {
		first, last uint64
		want        string
	}{
		{4, 10, ""},
		{2, 12, ""}, // a purge did not happen, and entries were stored and not acknowledged
		{4, 9, "the newest entries, 10 to 10, are lost"},
		{6, 10, "the oldest entries, 4 to 5, are lost"},
	} {
		err := p.Check(tt.first, tt.last)
		if (err == nil) != (tt.want == "") || err != nil && err.Error() != tt.want {
			t.Errorf("%d to %d: got %v, want %q", tt.first, tt.last, err, tt.want)
		}
	}
	p.Forget()
	if err := p.Check(1, 0); err != nil {
		t.Errorf("after Forget: got %v", err)
	}
}

// TestPositionSurvivesACrashOfTheProcess starts again without an end, after each step.
func TestPositionSurvivesACrashOfTheProcess(t *testing.T) {
	dir := t.TempDir()
	wantDoubt(t, dir, "no such file")
	for _, first := range []uint64{0, 1, 1000, 1<<32 - 2} {
		p := setPosition(t, dir, first, 0)
		wantPosition(t, dir, first)
		for seq := first + 1; seq < first+5; seq++ {
			p.SetNewest(seq)
			wantPosition(t, dir, seq)
			if seq%3 == 0 {
				if err := p.Renew(); err != nil {
					t.Fatal(err)
				}
				wantPosition(t, dir, seq)
			}
			if err := p.SetPurged(seq - 1); err != nil {
				t.Fatal(err)
			}
			if err := openPosition(t, dir).Check(seq+1, seq); err == nil {
				t.Error("a loss of the newest entry is not noticed")
			}
			if err := openPosition(t, dir).Check(seq, seq); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestPositionIsRenewedWhileItIsWritten(t *testing.T) {
	dir := t.TempDir()
	p := setPosition(t, dir, 0, 0)
	var wg sync.WaitGroup
	wg.Go(func() {
		for range 100 {
			if err := p.Renew(); err != nil {
				t.Error(err)
			}
		}
	})
	const last = 100_000
	for seq := uint64(1); seq <= last; seq++ {
		p.SetNewest(seq)
	}
	wg.Wait()
	wantPosition(t, dir, last)
}

func TestDamagedPositionIsInDoubt(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	setPosition(t, dir, 1000, 500)
	name := filepath.Join(dir, positionName)
	valid, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	write := func(b []byte) {
		t.Helper()
		if err := os.WriteFile(name, b, 0o600); err != nil { // the same file
			t.Fatal(err)
		}
	}
	for n := range len(valid) {
		write(valid[:n])
		wantDoubt(t, dir, fmt.Sprintf("it has %d bytes", n))
	}
	write(append(valid[:len(valid):len(valid)], 0))
	wantDoubt(t, dir, fmt.Sprintf("it has %d bytes", len(valid)+1))
	const unused = 7 * 8 // the beginning of the word that nothing uses
	for i := range valid {
		if i >= unused && i < unused+8 {
			continue
		}
		for _, change := range []byte{0x01, 0x80, 0xff} {
			b := append([]byte(nil), valid...)
			b[i] ^= change
			write(b)
			wantDoubt(t, dir, "it is damaged")
		}
	}
	for i := 0; i < len(valid); i += 8 {
		if i == unused {
			continue
		}
		b := append([]byte(nil), valid...)
		clear(b[i : i+8])
		write(b)
		wantDoubt(t, dir, "it is damaged")
	}
	write(make([]byte, len(valid)))
	wantDoubt(t, dir, "it is damaged")
	write(valid)
	wantPosition(t, dir, 1000)
}

func TestPositionOfAnotherEpochIsInDoubt(t *testing.T) {
	dir := t.TempDir()
	p := openPosition(t, dir)
	if err := p.Set("another", 1, 0); err != nil {
		t.Fatal(err)
	}
	wantDoubt(t, dir, "another epoch")
}

func TestCopiedPositionIsInDoubt(t *testing.T) {
	t.Parallel()
	read := func(t *testing.T, dir string) []byte {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(dir, positionName))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	write := func(t *testing.T, dir string, b []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, positionName), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("in another directory", func(t *testing.T) {
		dir, to := t.TempDir(), t.TempDir()
		setPosition(t, dir, 10, 0)
		write(t, to, read(t, dir))
		wantDoubt(t, to, "it is a copy")
	})
	for name, renew := range map[string]func(p *embedded.Position, dir string){
		"over the file after a renewal": func(p *embedded.Position, _ string) {
			if err := p.Renew(); err != nil {
				t.Error(err)
			}
		},
		"over the file after the end": func(p *embedded.Position, _ string) {
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		},
		"over the file after a start": func(_ *embedded.Position, dir string) { setPosition(t, dir, 11, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			p := setPosition(t, dir, 10, 0)
			was := read(t, dir)
			p.SetNewest(11)
			renew(p, dir)
			wantPosition(t, dir, 11)
			write(t, dir, was)
			wantDoubt(t, dir, "it is a copy")
		})
	}
	t.Run("as a link", func(t *testing.T) {
		dir, to := t.TempDir(), t.TempDir()
		setPosition(t, dir, 10, 0)
		if err := os.Link(filepath.Join(dir, positionName), filepath.Join(to, positionName)); err != nil {
			t.Fatal(err)
		}
		wantDoubt(t, to, "it has another link")
		wantDoubt(t, dir, "it has another link")
		setPosition(t, dir, 10, 0)
		wantPosition(t, dir, 10)
		wantDoubt(t, to, "it is damaged")
	})
	t.Run("the directory is renamed", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "a")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		setPosition(t, dir, 10, 0)
		if err := os.Rename(dir, dir+"b"); err != nil {
			t.Fatal(err)
		}
		wantPosition(t, dir+"b", 10)
	})
}
