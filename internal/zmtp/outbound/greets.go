package outbound

import (
	"fmt"
	"io"

	"github.com/kvcast/kvcast/internal/zmtp"
)

// ReadGreeting returns nil once the peer of a connection has sent the signature with which each greeting of ZMTP begins. It returns an
// error if another peer answers, or the connection fails. It sends nothing.
func ReadGreeting(c io.Reader) error {
	var signature [zmtp.SignatureBytes]byte
	if _, err := io.ReadFull(c, signature[:]); err != nil {
		return fmt.Errorf("read signature: %w", err)
	}
	return zmtp.CheckGreeting(signature[:])
}
