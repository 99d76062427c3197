package interop_test

import (
	"context"
	"strings"

	"github.com/go-zeromq/zmq4"
)

func init() { goPeers["go-zeromq"] = runGoZeroMQ }

// runGoZeroMQ is a peer.
func runGoZeroMQ(a arguments) error {
	pub := zmq4.NewPub(context.Background(), zmq4.WithAutomaticReconnect(true))
	if a.how == "connect" {
		if err := pub.Dial(a.endpoint); err != nil {
			return err
		}
	} else {
		if err := pub.Listen(strings.Replace(a.endpoint, "*", "0", 1)); err != nil {
			return err
		}
		if strings.HasPrefix(a.endpoint, "tcp:") {
			a.endpoint = "tcp://" + pub.Addr().String()
		}
	}
	return serveLines(a.endpoint, func(frames [][]byte) error { return pub.SendMulti(zmq4.NewMsgFrom(frames...)) })
}
