package enginegrpc

import (
	"context"
	"fmt"
	"net"

	"golang.org/x/net/http2"
)

// Greets connects to an address of package net over tcp, and returns nil once the peer has sent the settings with which a server of
// HTTP/2 begins. It returns an error if another peer answers, the connection fails, or ctx ends first. It closes the connection.
func Greets(ctx context.Context, address string) error {
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer func() {
		if stop() {
			_ = c.Close()
		}
	}()
	if _, err := c.Write([]byte(http2.ClientPreface)); err != nil {
		return fmt.Errorf("send preface: %w", err)
	}
	framer := http2.NewFramer(c, c)
	if err := framer.WriteSettings(); err != nil {
		return fmt.Errorf("send settings: %w", err)
	}
	switch header, err := framer.ReadFrameHeader(); {
	case err != nil:
		return fmt.Errorf("read settings: %w", err)
	case header.Type != http2.FrameSettings || header.StreamID != 0:
		return fmt.Errorf("the peer begins with a frame of type %v: it does not speak HTTP/2", header.Type)
	}
	return nil
}
