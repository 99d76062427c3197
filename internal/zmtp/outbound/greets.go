package outbound

import (
	"context"
	"fmt"
	"io"
	"net"

	"github.com/kvcast/kvcast/internal/zmtp"
)

// Greets connects to an address of package net, and returns nil once the peer has sent the signature with which each
// greeting of ZMTP begins. It returns an error if another peer answers, the connection fails, or ctx ends first. It
// sends nothing, and closes the connection.
func Greets(ctx context.Context, network, address string) error {
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, network, address)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer func() {
		if stop() {
			_ = c.Close()
		}
	}()
	var signature [zmtp.SignatureBytes]byte
	if _, err := io.ReadFull(c, signature[:]); err != nil {
		return fmt.Errorf("read signature: %w", err)
	}
	return zmtp.CheckGreeting(signature[:])
}
