package enginegrpc

import (
	"fmt"
	"io"

	"golang.org/x/net/http2"
)

// ReadGreeting returns nil once the peer of a connection has sent the settings with which a server of HTTP/2 begins. It returns an error if
// another peer answers, or the connection fails.
func ReadGreeting(c io.ReadWriter) error {
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
