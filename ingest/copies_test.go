package ingest_test

import (
	"testing"
	"time"

	"github.com/kvcast/kvcast/ingest"
)

// ruleSink passes on the copy rule of each batch.
type ruleSink struct{ rules chan ingest.CopyRule }

func (s ruleSink) AddWorker(ingest.Worker) ingest.Lane    { return s }
func (ruleSink) RemoveWorker(string, ingest.RemoveReason) {}
func (s ruleSink) Batch(b *ingest.Batch)                  { s.rules <- b.CopyRule }
func (ruleSink) Gap(ingest.Gap)                           {}
func (ruleSink) Restarted(ingest.Restart)                 {}
func (s ruleSink) wantRule(t *testing.T, want ingest.CopyRule) {
	t.Helper()
	select {
	case got := <-s.rules:
		if got != want {
			t.Errorf("copy rule: got %d, want %d", got, want)
		}
	case <-time.After(patience):
		t.Error("no batch came")
	}
}

// TestBatchesHaveTheCopyRuleOfTheirSource has engines that are connected to, and ones
// that connect.
func TestBatchesHaveTheCopyRuleOfTheirSource(t *testing.T) {
	for name, test := range map[string]struct {
		engine ingest.Engine
		copies ingest.Copies
		want   ingest.CopyRule
	}{
		"default":                {want: ingest.CopyRuleDetected},
		"auto":                   {engine: ingest.EngineVLLM, copies: ingest.CopiesAuto, want: ingest.CopyRuleDetected},
		"auto with SGLang":       {engine: ingest.EngineSGLang, copies: ingest.CopiesAuto, want: ingest.CopyRuleCounted},
		"auto with TensorRT-LLM": {engine: ingest.EngineTRTLLM, want: ingest.CopyRuleCounted},
		"auto with KVBM":         {engine: ingest.EngineKVBM, want: ingest.CopyRuleCounted},
		"auto with llm-d-sim":    {engine: ingest.EngineLLMDSim, want: ingest.CopyRuleCounted},
		"counted":                {copies: ingest.CopiesCounted, want: ingest.CopyRuleCounted},
		"announced last":         {copies: ingest.CopiesAnnouncedLast, want: ingest.CopyRuleAnnouncedLast},
		"SGLang announced last":  {engine: ingest.EngineSGLang, copies: ingest.CopiesAnnouncedLast, want: ingest.CopyRuleAnnouncedLast},
	} {
		t.Run(name+"/connect", func(t *testing.T) {
			sink := ruleSink{make(chan ingest.CopyRule, 16)}
			e := newEngine(t)
			_, stop := start(t, worker(ingest.SourceConfig{
				Engine: test.engine, Copies: test.copies, Connect: e.mustBind("tcp://127.0.0.1:*"),
			}), sink)
			defer stop()
			e.awaitSubscriber("")
			e.publish(1, stored(1))
			sink.wantRule(t, test.want)
		})
		t.Run(name+"/bind", func(t *testing.T) {
			sink := ruleSink{make(chan ingest.CopyRule, 16)}
			in, stop := start(t, ingest.Config{Listeners: []ingest.ListenerConfig{{
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
