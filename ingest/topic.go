package ingest

import (
	"path"
	"strings"
)

// topicForm is the form of the topics that name a worker.
const topicForm = "kv@POD@MODEL"

// matchTopic tells whether a topic matches one of the patterns, which slashless
// was applied to.
func matchTopic(patterns []string, topic string) bool {
	topic = slashless(topic)
	for _, p := range patterns {
		if ok, err := path.Match(p, topic); err == nil && ok {
			return true
		}
	}
	return false
}

// slashless makes slashes characters like any other to path.Match. A NUL can
// take their place, as a topic ends before the first.
func slashless(s string) string { return strings.ReplaceAll(s, "/", "\x00") }
