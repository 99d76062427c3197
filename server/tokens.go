package server

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"strings"
)

// Role is what the bearer of a token may do.
type Role string

const (
	// RoleRouter may call all of RouterEventService.
	RoleRouter Role = "router"
	// RoleOperator may call everything.
	RoleOperator Role = "operator"
)

// How long a token may be. Shorter ones can be guessed.
const (
	minToken = 16
	maxToken = 1024
)

// Tokens are the bearer tokens that are good, each with its role. They never
// change, and only their SHA-256 sums are kept.
type Tokens struct {
	known []knownToken
}

type knownToken struct {
	sum  [sha256.Size]byte
	role Role
	line int
}

// ParseTokens reads a file of tokens: in each line ROLE TOKEN, a blank, or a
// comment behind #. An error begins with the file's name and the line, and never
// shows what stands there, as it may be a token.
func ParseTokens(name string, text []byte) (*Tokens, error) {
	t := new(Tokens)
	number := 0
	for line := range strings.Lines(string(text)) {
		number++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if err := t.add(line, number); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", name, number, err)
		}
	}
	if len(t.known) == 0 {
		return nil, fmt.Errorf("%s: no token is not allowed: want one ROLE TOKEN a line at least, with the role router or operator", name)
	}
	return t, nil
}

// add adds the token of a line.
func (t *Tokens) add(line string, number int) error {
	fields := strings.Fields(line)
	if len(fields) != 2 {
		return errors.New("the line is not allowed: want two words, ROLE TOKEN")
	}
	role, token := Role(fields[0]), fields[1]
	if role != RoleRouter && role != RoleOperator {
		return errors.New("the role is not allowed: want router or operator, and then the token")
	}
	if len(token) < minToken || len(token) > maxToken || strings.IndexFunc(token, notInToken) >= 0 {
		return fmt.Errorf("the token is not allowed: want %d to %d visible ASCII characters", minToken, maxToken)
	}
	sum := sha256.Sum256([]byte(token))
	for _, k := range t.known {
		if k.sum == sum {
			return fmt.Errorf("the token is not allowed twice: it is in line %d already", k.line)
		}
	}
	t.known = append(t.known, knownToken{sum: sum, role: role, line: number})
	return nil
}

// notInToken tells whether a header could not carry the character.
func notInToken(c rune) bool { return c <= ' ' || c > '~' }

// role returns the role of a token. The time that it takes says nothing of the
// tokens that are good.
func (t *Tokens) role(token string) (role Role, ok bool) {
	sum := sha256.Sum256([]byte(token))
	for i := range t.known {
		if subtle.ConstantTimeCompare(sum[:], t.known[i].sum[:]) == 1 {
			role, ok = t.known[i].role, true
		}
	}
	return role, ok
}
