package transport

import (
	"bytes"
	"slices"
)

const (
	// maxDroppedTopics is how many topics of dropped messages are recorded. For messages with other topics, the connection is recorded. The
	// number of connections is bounded by the number of file descriptors.
	maxDroppedTopics = 1024
	// maxDroppedTopicBytes is the length of the longest topic that is recorded.
	maxDroppedTopicBytes = 2048
	// publishedFrames is how many frames an engine's message has: topic, seq, payload.
	publishedFrames = 3
)

// Drops are messages that were dropped because a Receiver had no room for them.
type Drops struct {
	// topics are the messages' topics, up to a NUL, each with the connection of the first message.
	topics map[string]int
	// connections are the connections whose topics were too many to be recorded.
	connections map[int]struct{}
}

// Add records a dropped message.
func (d *Drops) Add(m Message) {
	if len(m.Frames) != publishedFrames {
		return // not an engine's message
	}
	topic, _, _ := bytes.Cut(m.Frames[0], []byte{0})
	if _, ok := d.topics[string(topic)]; !ok && len(topic) <= maxDroppedTopicBytes {
		d.addTopic(string(topic), m.Conn)
	}
}

func (d *Drops) addTopic(topic string, conn int) {
	if len(d.topics) >= maxDroppedTopics {
		d.addConnection(conn)
		return
	}
	if d.topics == nil {
		d.topics = make(map[string]int)
	}
	d.topics[topic] = conn
}

func (d *Drops) addConnection(conn int) {
	if d.connections == nil {
		d.connections = make(map[int]struct{})
	}
	d.connections[conn] = struct{}{}
}

// Merge adds the messages of other.
func (d *Drops) Merge(other *Drops) {
	for conn := range other.connections {
		d.addConnection(conn)
	}
	for topic, conn := range other.topics {
		d.addTopic(topic, conn)
	}
}

// MayInclude reports whether a message of a topic that arrived by one of these connections may have been dropped.
func (d *Drops) MayInclude(topic string, connections ...int) bool {
	if _, ok := d.topics[topic]; ok {
		return true
	}
	return slices.ContainsFunc(connections, func(conn int) bool { _, ok := d.connections[conn]; return ok })
}
