package sequence

import "testing"

// The engine restarts before the end marker of a replay, and its next incarnation continues the seqs
// on another connection. The end of the replay does not deliver that batch, because the replies say
// nothing about its incarnation.
func TestRestartDuringTheReplayOfTheStartIsRecognised(t *testing.T) {
	for _, outcome := range []Outcome{OutcomeFailed, OutcomeSilent, OutcomeComplete} {
		s := newScript(t)
		s.connect()
		s.m.Sent(s.request.ID)
		for seq := range uint64(3) {
			s.reply(batchOf(0, seq))
		}
		s.want("batch 0 of 0", "batch 1 of 0", "batch 2 of 0")
		s.connect()
		s.live("", 1, 3)
		s.end(outcome)
		s.finish(1, 3)
		s.want("restarted", "batch 0 of 1", "batch 1 of 1", "batch 2 of 1", "batch 3 of 1")
	}
}

// A request is sent while there is no connection, and the engine restarts after its replies. They say
// nothing about the batches of the connection that follows.
func TestRestartAfterRepliesWithoutAConnectionIsRecognised(t *testing.T) {
	s := newScript(t)
	s.connect()
	s.disconnect()
	s.m.Sent(s.request.ID)
	s.connect()
	s.live("", 1, 1)
	s.reply(batchOf(0, 0))
	s.end(OutcomeSilent)
	s.want("batch 0 of 0")
	s.finish(1, 1)
	s.want("restarted", "batch 0 of 1", "batch 1 of 1")
}

// The batches that are buffered when the engine leaves are delivered, although requests that were
// answered before are answered no more.
func TestBufferedBatchesAreDeliveredWhenTheEngineLeaves(t *testing.T) {
	s := newScript(t)
	s.begin("", 9)
	s.live("", 0, 12)
	s.reply(batchOf(0, 9))
	s.reply(batchOf(0, 10))
	s.disconnect()
	for s.end(OutcomeFailed) {
	}
	s.want("batch 10 of 0", "gap replay_incomplete 11-11", "batch 12 of 0")
}

// The replies are of the next incarnation, and a batch of the former incarnation follows them by its
// seq. The engine then has the first batches that were read, but not the last.
func TestBatchOfTheFormerIncarnationAfterRepliesIsRecognised(t *testing.T) {
	s := newScript(t)
	s.connect()
	s.live("", 0, 1)
	s.answer(1, 0, 0, OutcomeComplete)
	s.want("batch 0 of 1", "batch 1 of 0")
	s.connect()
	s.finish(1, 0)
	s.want("restarted", "batch 0 of 1")
	s.live("", 1, 1)
	s.finish(1, 1)
	s.want("batch 1 of 1")
}

// A replay brings nothing, and a batch of the next incarnation arrives after the request. The batch is
// delivered only after another request.
func TestBatchAfterAnEmptyReplayIsVerified(t *testing.T) {
	s := newScript(t)
	s.begin("", 0)
	s.live("", 0, 2) // 1 is missing
	s.connect()
	s.end(OutcomeFailed)
	none := func() {
		s.m.Sent(s.request.ID)
		s.end(OutcomeComplete)
	}
	none() // targetRest
	none() // targetPast
	s.want("gap possible_restart 0-0")
	none() // targetRest
	s.m.Sent(s.request.ID)
	s.live("", 1, 1)
	s.end(OutcomeComplete) // targetPast
	s.want()
	s.finish(1, 1)
	s.want("restarted", "batch 0 of 1", "batch 1 of 1")
}

// The engine keeps no batches, because the replay brings nothing although a batch of the connection arrived
// before the request. Batches that arrived later do not wait for another request.
func TestBatchesOfAnEngineThatKeepsNoneAreDelivered(t *testing.T) {
	s := newScript(t)
	s.begin("", 0)
	s.connect()
	s.live("", 0, 1)
	for seq := uint64(2); s.request != nil; seq++ {
		if seq > 8 {
			t.Fatal("still requests")
		}
		s.m.Sent(s.request.ID)
		s.live("", 0, seq)
		s.end(OutcomeComplete)
	}
	s.want("gap possible_restart 0-0", "batch 1 of 0", "batch 2 of 0", "batch 3 of 0", "batch 4 of 0", "batch 5 of 0", "batch 6 of 0")
}

// A batch of a closed connection is older than the open connection.
func TestBatchOfAClosedConnectionIsStale(t *testing.T) {
	s := newScript(t)
	s.connectTo("")
	s.live("", 1, 2)
	s.want("joined late 0-1", "batch 2 of 1")
	for seq := range uint64(4) {
		s.do(s.m.Arrival(s.now, 0, batchOf(0, seq)))
	}
	s.live("", 1, 3)
	s.want("batch 3 of 1")
}

// A batch that arrives after the end of its connection is older than a request that was sent in between.
func TestLateBatchIsOlderThanARequestWithoutAConnection(t *testing.T) {
	s := newScript(t)
	s.begin("", 1)
	s.live("", 0, 3) // 2 is missing
	s.disconnect()
	s.m.Sent(s.request.ID)
	s.do(s.m.Arrival(s.now, 0, batchOf(0, 4)))
	s.answer(1, 0, 3, OutcomeComplete)
	s.answer(1, 0, 3, OutcomeComplete)
	if s.request != nil {
		t.Error("still requests")
	}
	s.want("restarted", "batch 0 of 1", "batch 1 of 1", "batch 2 of 1", "batch 3 of 1")
}

// A connection can open and close before the machine is told of it. Its batches then arrive without a
// connection, and the engine may have restarted before them.
func TestBatchesOfAnUnknownConnectionAreVerified(t *testing.T) {
	arrive := func(s *script, incarnation, seq uint64) { s.do(s.m.Arrival(s.now, 0, batchOf(incarnation, seq))) }
	start := func(t *testing.T) *script {
		s := newScript(t)
		s.begin("", 0)
		s.disconnect()
		arrive(s, 1, 1)
		s.want()
		return s
	}
	t.Run("by a replay", func(t *testing.T) {
		s := start(t)
		s.finish(1, 1)
		s.want("restarted", "batch 0 of 1", "batch 1 of 1")
	})
	t.Run("by a replay that was requested on the last connection", func(t *testing.T) {
		s := newScript(t)
		s.begin("", 0)
		s.live("", 0, 2) // 1 is missing
		s.reply(batchOf(0, 0))
		s.reply(batchOf(0, 1))
		s.disconnect()
		arrive(s, 1, 3)
		s.end(OutcomeComplete)
		s.want("batch 1 of 0", "batch 2 of 0")
		s.finish(1, 3)
		s.want("restarted", "batch 0 of 1", "batch 1 of 1", "batch 2 of 1", "batch 3 of 1")
	})
	t.Run("if the last request failed", func(t *testing.T) {
		s := newScript(t)
		s.begin("", 0)
		s.live("", 0, 1)
		s.live("", 0, 3) // 2 is missing
		for s.end(OutcomeFailed) {
		}
		s.disconnect()
		arrive(s, 1, 4)
		s.want("batch 1 of 0", "gap replay_unavailable 2-2", "batch 3 of 0")
		s.finish(1, 4)
		s.want("restarted", "batch 0 of 1", "batch 1 of 1", "batch 2 of 1", "batch 3 of 1", "batch 4 of 1")
	})
	t.Run("else it is reported", func(t *testing.T) {
		s := start(t)
		for s.end(OutcomeFailed) {
		}
		s.want("gap possible_restart 0-0", "batch 1 of 1")
	})
	t.Run("also if there was no other", func(t *testing.T) {
		s := newScript(t)
		arrive(s, 0, 0)
		arrive(s, 1, 1)
		s.want("batch 0 of 0", "batch 1 of 1")
		s.connect()
		s.want("gap possible_restart 0-0")
	})
}

// The first batch of a connection can arrive after those of the next connection. The engine may have
// restarted in between.
func TestBatchesOfALateConnectionAreVerified(t *testing.T) {
	start := func(t *testing.T) *script {
		s := newScript(t)
		s.connect()
		s.finish(1, 0)
		s.want("batch 0 of 1")
		s.do(s.m.Connect(s.now, Connection{ID: 9, Replay: replayEndpoint}))
		s.do(s.m.Arrival(s.now, 9, batchOf(0, 1)))
		return s
	}
	leave := func(s *script) { s.do(s.m.Disconnect(s.now, 9)) }
	t.Run("before the next batch", func(t *testing.T) {
		s := start(t)
		leave(s)
		s.live("", 1, 1)
		s.answer(1, 0, 0, OutcomeSilent)
		s.want()
		s.finish(1, 1)
		s.want("batch 1 of 1")
	})
	t.Run("after they were delivered", func(t *testing.T) {
		s := start(t)
		s.answer(1, 0, 0, OutcomeComplete)
		s.want("batch 1 of 0")
		leave(s)
		s.finish(1, 2)
		s.want("restarted", "batch 0 of 1", "batch 1 of 1", "batch 2 of 1")
	})
}

// Without a replay socket, the batches of a late connection and those that follow its end may be of two
// incarnations, which only a report tells.
func TestEndOfALateConnectionWithoutReplayIsReported(t *testing.T) {
	s := newScript(t)
	s.connectTo("")
	s.live("", 1, 0)
	s.live("", 1, 1)
	s.do(s.m.Connect(s.now, Connection{ID: 9}))
	s.do(s.m.Arrival(s.now, 9, batchOf(0, 2)))
	s.do(s.m.Disconnect(s.now, 9))
	s.live("", 1, 3)
	s.want("batch 0 of 1", "batch 1 of 1", "gap possible_restart 0-0", "batch 2 of 0", "gap possible_restart 0-0", "batch 3 of 1")
	s.do(s.m.Connect(s.now, Connection{ID: 10}))
	s.do(s.m.Disconnect(s.now, 10))
	s.want("gap possible_restart 0-0") // once, because no batch was read in between
}

// The first batch of a former incarnation can arrive after those of the next. When its connection ends,
// the next batch is of the next incarnation, which the machine has read before.
func TestBatchAfterTheEndOfALateConnectionIsNotStale(t *testing.T) {
	s := newScript(t)
	s.begin("1", 8)
	s.connect()
	s.live("3", 3, 0)
	s.want("restarted")
	s.do(s.m.Connect(s.now, Connection{ID: 9, Replay: replayEndpoint}))
	late := batchOf(2, 0)
	late.Epoch = []byte("2")
	s.do(s.m.Arrival(s.now, 9, late))
	s.want("restarted")
	s.finish(3, 0)
	s.do(s.m.Disconnect(s.now, 9))
	s.finish(3, 0)
	s.want("batch 0 of 3")
	s.live("3", 3, 1)
	s.finish(3, 1)
	s.want("restarted", "batch 0 of 3", "batch 1 of 3")
}

// An engine with batches that are older than all that are remembered, and without the last batch, is of
// another incarnation.
func TestReplayOlderThanTheHistoryIsARestart(t *testing.T) {
	s := newScript(t)
	s.begin("", 0)
	for seq := range uint64(historySize + 1) {
		s.live("", 0, seq+1)
	}
	s.lines = nil
	s.connect()
	s.end(OutcomeComplete) // targetRest
	s.answer(1, 0, 0, OutcomeComplete)
	s.finish(1, 0)
	s.want("restarted", "batch 0 of 1")
}
