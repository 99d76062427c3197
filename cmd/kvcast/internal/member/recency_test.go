package member

import (
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/journal/jetstream"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// TestConfirmed has a server's clock that is an hour ahead of the own one. Times are in seconds by the own clock.
func TestConfirmed(t *testing.T) {
	const skew = time.Hour
	zero := time.Now()
	at := func(second int) time.Time { return zero.Add(time.Duration(second) * time.Second) }
	known := recency{stream: at(10), asked: at(9), told: at(9).Add(skew)}
	claimed := jetstream.Owner{Instance: "a", Writer: "a", Seq: 7}
	beat := func(second int, seq uint64) *instance {
		return &instance{heartbeat: heartbeat{Seq: seq, OthersLive: true}, seen: at(100), stored: at(second).Add(skew)}
	}
	stalled := beat(9, 7)
	stalled.Stalled = 5 * time.Second
	waiting := beat(8, 7)
	waiting.Wait = 3 * time.Second
	for name, tt := range map[string]struct {
		recency recency
		of      *instance
		want    int // -1: not confirmed
	}{
		"a heartbeat after the stream was read":    {known, beat(12, 7), 10},
		"a heartbeat before":                       {known, beat(8, 9), 8},
		"a heartbeat that was read late":           {known, beat(-60, 7), -60},
		"no instance":                              {known, nil, -1},
		"a heartbeat before the claim":             {known, beat(12, 6), -1},
		"a worker that is not read yet":            {known, &instance{heartbeat: heartbeat{Seq: 7, OthersLive: true, States: map[string]kvcastv1.WorkerState{"w": 0}}}, -1},
		"states of an earlier version are unknown": {known, &instance{heartbeat: heartbeat{Seq: 7}}, -1},
		"appends that wait":                        {known, stalled, 4},
		"events that may wait":                     {known, waiting, 5},
	} {
		got, ok := tt.recency.confirmed("w", claimed, tt.of)
		if ok != (tt.want >= 0 || tt.want == -60) || ok && !got.Equal(at(tt.want)) {
			t.Errorf("%s: got %v, %v, want second %d", name, got.Sub(zero), ok, tt.want)
		}
	}
	if got, ok := (&recency{stream: at(10)}).confirmed("w", claimed, beat(12, 7)); !ok || got.After(time.Time{}) {
		t.Errorf("with a clock that was never told: got %v, %v", got, ok)
	}
}

// TestKnowledgeOfOwners has the four kinds of owners that a worker can have.
func TestKnowledgeOfOwners(t *testing.T) {
	m := New(Config{ID: "self", TTL: 3 * time.Second})
	now := time.Now()
	before, stream := now.Add(-time.Minute), now.Add(-time.Second)
	m.recency = recency{stream: stream, asked: now, told: now}
	m.instances["other"] = &instance{heartbeat: heartbeat{Seq: 9, OthersLive: true}, stored: now.Add(-2 * time.Second)}
	m.claims.seqs["read"] = 3
	for name, tt := range map[string]struct {
		owner   jetstream.Owner
		stalled time.Time
		want    time.Time
	}{
		"read":     {jetstream.Owner{Instance: "self", Writer: "self", Seq: 3}, time.Time{}, stream},
		"claimed":  {jetstream.Owner{Instance: "self", Writer: "self", Seq: 3}, time.Time{}, before},
		"remote":   {jetstream.Owner{Instance: "other", Writer: "other", Seq: 3}, now.Add(-time.Hour), now.Add(-2 * time.Second)},
		"gone":     {jetstream.Owner{Instance: "third", Writer: "third", Seq: 3}, time.Time{}, before},
		"released": {jetstream.Owner{Instance: "other", Writer: "self", Seq: 3}, time.Time{}, before},
		"nobody's": {jetstream.Owner{Writer: "self", Seq: 3}, time.Time{}, before},
	} {
		if got := m.confirmed(name, owner{tt.owner, before}, tt.stalled); !got.Equal(tt.want) {
			t.Errorf("%s: confirmed %v ago, want %v", name, now.Sub(got), now.Sub(tt.want))
		}
	}
	read := owner{jetstream.Owner{Instance: "self", Writer: "self", Seq: 3}, before}
	if got := m.confirmed("read", read, now.Add(-5*time.Second)); !got.Equal(now.Add(-5 * time.Second)) {
		t.Errorf("with appends that wait: confirmed %v ago, want 5s", now.Sub(got))
	}
	m.parts.PipelineConfig.Timeout = 4 * time.Second
	if got := m.confirmed("read", read, now.Add(-5*time.Second)); !got.Equal(now.Add(-9 * time.Second)) {
		t.Errorf("with appends and events that wait: confirmed %v ago, want 9s", now.Sub(got))
	}
	if got := m.confirmed("read", read, time.Time{}); !got.Equal(stream.Add(-4 * time.Second)) {
		t.Errorf("with events that wait: confirmed %v ago, want 5s", now.Sub(got))
	}
}
