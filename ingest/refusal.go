package ingest

// refusal is why a message is not taken. A refused message of a publisher that
// is read leaves a hole in its seqs, which is reported with its next batch.
type refusal uint8

const (
	// refusedFrames: not the three frames topic, seq, payload.
	refusedFrames refusal = iota
	// refusedSeq: a seq that is not 8 bytes.
	refusedSeq
	// refusedRanks: a dp rank, or a listener's publisher, beyond MaxRanks of its
	// worker.
	refusedRanks
	// refusedTopic: a topic that matches no pattern of the listener, or is not of
	// the form that names a worker.
	refusedTopic
	// refusedName: a pod or model in the topic that can not be a name.
	refusedName
	// refusedModel: a second model under the pod of another.
	refusedModel
	// refusedTaken: a pod that has the name of a worker read elsewhere.
	refusedTaken
	// refusedWorkers: a worker beyond MaxWorkers.
	refusedWorkers

	numRefusals
)

var refusalNames = [numRefusals]string{
	refusedFrames:  "wrong_frames",
	refusedSeq:     "bad_seq",
	refusedRanks:   "too_many_ranks",
	refusedTopic:   "foreign_topic",
	refusedName:    "bad_name",
	refusedModel:   "second_model",
	refusedTaken:   "name_taken",
	refusedWorkers: "too_many_workers",
}

// String returns the refusal's name, as metrics label it.
func (r refusal) String() string { return refusalNames[r] }
