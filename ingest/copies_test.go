package ingest_test

import (
	"testing"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/test/harness"
)

// ruleSink sends the copy rule of each batch to a channel.
type ruleSink struct{ rules chan feed.CopyRule }

func (s ruleSink) AddWorker(feed.Worker) feed.Lane      { return s }
func (ruleSink) RemoveWorker(string, feed.RemoveReason) {}
func (s ruleSink) Batch(b *feed.Batch)                  { s.rules <- b.CopyRule }
func (ruleSink) Gap(feed.Gap)                           {}
func (ruleSink) Restarted(feed.Restart)                 {}
func (s ruleSink) wantRule(t *testing.T, want feed.CopyRule) {
	t.Helper()
	select {
	case got := <-s.rules:
		if got != want {
			t.Errorf("copy rule: got %d, want %d", got, want)
		}
	case <-time.After(harness.Timeout):
		t.Error("no batch came")
	}
}

// TestBatchesHaveTheirSourcesCopyRule reads engines by a connection and by a listener.
func TestBatchesHaveTheirSourcesCopyRule(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		engine feed.Engine
		copies config.Copies
		want   feed.CopyRule
	}{
		"default":                {want: feed.CopyRuleDetected},
		"auto":                   {engine: feed.EngineVLLM, copies: config.CopiesAuto, want: feed.CopyRuleDetected},
		"auto with SGLang":       {engine: feed.EngineSGLang, copies: config.CopiesAuto, want: feed.CopyRuleCounted},
		"auto with TensorRT-LLM": {engine: feed.EngineTRTLLM, want: feed.CopyRuleCounted},
		"auto with KVBM":         {engine: feed.EngineKVBM, want: feed.CopyRuleCounted},
		"auto with llm-d-sim":    {engine: feed.EngineLLMDSim, want: feed.CopyRuleCounted},
		"counted":                {copies: config.CopiesCounted, want: feed.CopyRuleCounted},
		"announced last":         {copies: config.CopiesAnnouncedLast, want: feed.CopyRuleAnnouncedLast},
		"SGLang announced last":  {engine: feed.EngineSGLang, copies: config.CopiesAnnouncedLast, want: feed.CopyRuleAnnouncedLast},
	} {
		t.Run(name+"/connect", func(t *testing.T) {
			sink := ruleSink{make(chan feed.CopyRule, 16)}
			e := newEngine(t)
			_, stop := start(t, worker(config.Source{
				Engine: test.engine, Copies: test.copies, Connect: e.mustBind("tcp://127.0.0.1:*"),
			}), sink)
			defer stop()
			e.awaitSubscriber("")
			e.publish(1, stored(1))
			sink.wantRule(t, test.want)
		})
		t.Run(name+"/bind", func(t *testing.T) {
			sink := ruleSink{make(chan feed.CopyRule, 16)}
			in, stop := start(t, config.Config{Listeners: []config.Listener{{
				Bind: "tcp://127.0.0.1:*", Worker: "w", ReplayPort: -1, Engine: test.engine, Copies: test.copies,
			}}}, sink)
			defer stop()
			e := newEngine(t)
			e.connect(in.Endpoints()[0])
			e.awaitSubscriber("")
			e.publish(1, stored(1))
			sink.wantRule(t, test.want)
		})
	}
}
