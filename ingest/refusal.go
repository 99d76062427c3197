package ingest

import (
	"fmt"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/transport"
)

// refusal is why a message is refused. A refused message of a publisher leaves a gap in its seqs,
// which is repaired or reported like any other gap.
type refusal uint8

const (
	// refusedFrames: the frames are not topic, seq, payload.
	refusedFrames refusal = iota
	// refusedSeq: the seq does not have 8 bytes.
	refusedSeq
	// refusedTopicLength: the topic has more than config.MaxTopicBytes.
	refusedTopicLength
	// refusedLength: the payload has more than transport.MaxPayloadBytes.
	refusedLength
	// refusedRanks: the worker has feed.MaxRanks dp ranks, or Config.MaxRanks is reached.
	refusedRanks
	// refusedTopic: the topic matches no pattern of the listener, or does not name a worker.
	refusedTopic
	// refusedName: the pod or model in the topic is not a valid name.
	refusedName
	// refusedModel: the pod has another model already.
	refusedModel
	// refusedTaken: the pod has the name of another worker.
	refusedTaken
	// refusedWorkers: Config.MaxWorkers is reached.
	refusedWorkers
	// refusedSources: Config.MaxSources is reached.
	refusedSources

	numRefusals
)

// refusals has the name of each refusal in metrics, and what is accepted instead. For topics
// listener.wanted is more precise.
var refusals = [numRefusals]struct{ name, want string }{
	refusedFrames:      {"wrong_frames", "three frames: topic, seq, payload"},
	refusedSeq:         {"bad_seq", "a seq of 8 bytes"},
	refusedTopicLength: {"topic_too_long", fmt.Sprintf("a topic of at most %d bytes", config.MaxTopicBytes)},
	refusedLength:      {"message_too_long", fmt.Sprintf("a payload of at most %d MiB", transport.MaxPayloadBytes>>20)},
	refusedRanks:       {"too_many_ranks", fmt.Sprintf("at most %d dp ranks a worker, and no more of all workers than MaxRanks", feed.MaxRanks)},
	refusedTopic:       {"foreign_topic", topicForm},
	refusedName:        {"bad_name", "a POD of " + config.AllowedName + ", and a MODEL of " + config.AllowedModel},
	refusedModel:       {"second_model", "one model for each POD"},
	refusedTaken:       {"name_taken", "a POD that is no other worker's name"},
	refusedWorkers:     {"too_many_workers", "no more workers than MaxWorkers"},
	refusedSources:     {"too_many_sources", "no more sources than MaxSources"},
}

// String returns the refusal's name in metrics.
func (r refusal) String() string { return refusals[r].name }

// wanted describes what is accepted instead, for the log.
func (r refusal) wanted() string { return refusals[r].want }
