package access

import (
	"crypto/sha256"
	"crypto/x509"
	"fmt"
	"strings"
)

// Role determines the calls that a token or a client certificate permits.
type Role string

const (
	// RoleRouter permits all calls of RouterEventService and InspectionService.
	RoleRouter Role = "router"
	// RoleOperator permits all calls.
	RoleOperator Role = "operator"
)

// Token lengths in bytes. Shorter tokens can be guessed.
const (
	minToken = 16
	maxToken = 1024
)

// Tokens are the accepted bearer tokens with their roles. Tokens are immutable and do not contain the tokens
// themselves. Since a lookup is by SHA-256, its time does not reveal how much of a token is correct.
type Tokens struct {
	bySum map[[sha256.Size]byte]knownToken
}

type knownToken struct {
	role Role
	line int // in the tokens file
}

// ParseTokens parses the text of a tokens file. Each line is ROLE TOKEN, blank, or a comment that starts with #.
// Errors have the file's name and the line number, but not the line, since it may contain a token.
func ParseTokens(name string, text []byte) (*Tokens, error) {
	t := &Tokens{bySum: make(map[[sha256.Size]byte]knownToken)}
	if err := parseRoles(name, "token", text, t.add); err != nil {
		return nil, err
	}
	return t, nil
}

func (t *Tokens) add(role Role, token string, number int) error {
	invisible := func(c rune) bool { return c <= ' ' || c > '~' }
	if len(token) < minToken || len(token) > maxToken || strings.IndexFunc(token, invisible) >= 0 {
		return fmt.Errorf("the token is not allowed: want %d to %d visible ASCII characters", minToken, maxToken)
	}
	sum := sha256.Sum256([]byte(token))
	if k, ok := t.bySum[sum]; ok {
		return fmt.Errorf("the token is a duplicate of the one in line %d", k.line)
	}
	t.bySum[sum] = knownToken{role: role, line: number}
	return nil
}

// parseRoles parses a file whose lines are ROLE and a value, blank, or comments that start with #. There must be a value.
func parseRoles(name, value string, text []byte, add func(role Role, value string, line int) error) error {
	number, values := 0, 0
	for line := range strings.Lines(string(text)) {
		number++
		fields := strings.Fields(line)
		if len(fields) == 0 || strings.HasPrefix(fields[0], "#") {
			continue
		}
		err := fmt.Errorf("the line is not allowed: want two words, ROLE %s", strings.ToUpper(value))
		if len(fields) == 2 {
			if role := Role(fields[0]); role == RoleRouter || role == RoleOperator {
				err = add(role, fields[1], number)
			} else {
				err = fmt.Errorf("the role is not allowed: want router or operator, then the %s", value)
			}
		}
		if err != nil {
			return fmt.Errorf("%s:%d: %w", name, number, err)
		}
		values++
	}
	if values == 0 {
		return fmt.Errorf("%s: no %s found: want at least one line ROLE %s with the role router or operator", name, value, strings.ToUpper(value))
	}
	return nil
}

// maxCertificateName bounds a name in a certificates file, in bytes. DNS names have at most 253, SPIFFE ids 2048.
const maxCertificateName = 2048

// Certificates are the roles of client certificates, by a name in them: a URI or a DNS name, or, if a certificate has neither,
// the common name of its subject. Certificates are immutable.
type Certificates struct {
	roles map[string]Role
}

// ParseCertificates parses the text of a certificates file. Each line is ROLE NAME, blank, or a comment that starts with #.
func ParseCertificates(name string, text []byte) (*Certificates, error) {
	c := &Certificates{roles: make(map[string]Role)}
	err := parseRoles(name, "name", text, func(role Role, value string, _ int) error {
		switch {
		case len(value) > maxCertificateName:
			return fmt.Errorf("the name is not allowed: want at most %d bytes", maxCertificateName)
		case c.roles[value] != "":
			return fmt.Errorf("the name %q is there twice", value)
		}
		c.roles[value] = role
		return nil
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// role returns the role of a certificate: that of its first name that has one. Without a list, it is RoleRouter.
func (c *Certificates) role(cert *x509.Certificate) (Role, bool) {
	if c == nil {
		return RoleRouter, true
	}
	for _, name := range certificateNames(cert) {
		if role, ok := c.roles[name]; ok {
			return role, true
		}
	}
	return "", false
}

// certificateNames returns the names that count. CAs that restrict URIs and DNS names may permit any common name, so it counts
// alone only, and never as a URI.
func certificateNames(cert *x509.Certificate) []string {
	var names []string
	for _, uri := range cert.URIs {
		names = append(names, uri.String())
	}
	names = append(names, cert.DNSNames...)
	if len(names) == 0 && cert.Subject.CommonName != "" && !strings.Contains(cert.Subject.CommonName, "://") {
		names = append(names, cert.Subject.CommonName)
	}
	return names
}

// List determines who may call the server. A call needs a token of Tokens, or a client certificate that TLS has verified.
type List struct {
	// Tokens are the accepted bearer tokens; nil: none.
	Tokens *Tokens
	// Certificates are the roles of client certificates; nil: each one is a router's.
	Certificates *Certificates
}
