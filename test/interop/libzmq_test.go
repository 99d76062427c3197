//go:build cgo

package interop_test

import (
	"errors"
	"strings"
	"time"

	"github.com/pebbe/zmq4"
)

func init() { goPeers["libzmq"] = runLibzmq }

// runLibzmq is a peer.
func runLibzmq(a arguments) error {
	pub, err := zmq4.NewSocket(zmq4.PUB)
	if err != nil {
		return err
	}
	err = errors.Join(pub.SetLinger(0), pub.SetSndhwm(0), pub.SetIpv6(strings.Contains(a.endpoint, "[")))
	if a.heartbeat > 0 {
		err = errors.Join(err, pub.SetHeartbeatIvl(a.heartbeat), pub.SetHeartbeatTimeout(time.Minute))
	}
	if err != nil {
		return err
	}
	if a.how == "connect" {
		err = pub.Connect(a.endpoint)
	} else if err = pub.Bind(a.endpoint); err == nil {
		a.endpoint, err = pub.GetLastEndpoint()
	}
	if err != nil {
		return err
	}
	return serveLines(a.endpoint, func(frames [][]byte) error {
		_, err := pub.SendMessage(frames)
		return err
	})
}
