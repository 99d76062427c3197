package ingest

import (
	"fmt"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/transport"
)

// refusal is why a message is refused. A refused message of a publisher leaves a gap in its
// seqs, which is repaired or reported like any other.
type refusal uint8

const (
	// refusedFrames: the frames are not topic, seq, payload.
	refusedFrames refusal = iota
	// refusedSeq: a seq that is not 8 bytes.
	refusedSeq
	// refusedTopicLength: a topic of more than config.MaxTopicBytes.
	refusedTopicLength
	// refusedLength: a payload of more than transport.MaxPayloadBytes.
	refusedLength
	// refusedRanks: a dp rank beyond feed.MaxRanks of the worker, or Config.MaxRanks.
	refusedRanks
	// refusedTopic: a topic that matches no pattern of the listener, or names no worker.
	refusedTopic
	// refusedName: a pod or model in the topic that is no valid name.
	refusedName
	// refusedModel: a second model under the pod of another.
	refusedModel
	// refusedTaken: a pod with the name of another worker.
	refusedTaken
	// refusedWorkers: a worker beyond Config.MaxWorkers.
	refusedWorkers
	// refusedSources: a source beyond Config.MaxSources.
	refusedSources

	numRefusals
)

var refusalNames = [numRefusals]string{
	refusedFrames:      "wrong_frames",
	refusedSeq:         "bad_seq",
	refusedTopicLength: "topic_too_long",
	refusedLength:      "message_too_long",
	refusedRanks:       "too_many_ranks",
	refusedTopic:       "foreign_topic",
	refusedName:        "bad_name",
	refusedModel:       "second_model",
	refusedTaken:       "name_taken",
	refusedWorkers:     "too_many_workers",
	refusedSources:     "too_many_sources",
}

// refusalWants describe what is accepted instead. See listener.wanted for topics.
var refusalWants = [numRefusals]string{
	refusedFrames:      "three frames: topic, seq, payload",
	refusedSeq:         "a seq of 8 bytes",
	refusedTopicLength: fmt.Sprintf("a topic of at most %d bytes", config.MaxTopicBytes),
	refusedLength:      fmt.Sprintf("a payload of at most %d MiB", transport.MaxPayloadBytes>>20),
	refusedRanks:       fmt.Sprintf("at most %d dp ranks a worker, and no more of all workers than MaxRanks", feed.MaxRanks),
	refusedTopic:       topicForm,
	refusedName:        "a POD of " + config.AllowedName + ", and a MODEL of " + config.AllowedModel,
	refusedModel:       "one model for each POD",
	refusedTaken:       "a POD that is no other worker's name",
	refusedWorkers:     "no more workers than MaxWorkers",
	refusedSources:     "no more sources than MaxSources",
}

// String returns the refusal's name, as metrics label it.
func (r refusal) String() string { return refusalNames[r] }

// wanted describes what is accepted instead, for the log.
func (r refusal) wanted() string { return refusalWants[r] }
