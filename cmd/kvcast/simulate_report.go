package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/kvcast/kvcast/internal/simulator"
)

// engineStarted and engineEnded are what programs are told of an engine.
type engineStarted struct {
	Engine   string `json:"engine"`
	Endpoint string `json:"endpoint"`
	Replay   string `json:"replay,omitempty"`
}

type engineEnded struct {
	Engine  string `json:"engine"`
	Engines int    `json:"engines,omitempty"` // of the last line, which is about all
	Batches uint64 `json:"batches"`
	Events  uint64 `json:"events"`
	Stored  uint64 `json:"stored_blocks"`
	Removed uint64 `json:"removed_blocks"`
	Blocks  int    `json:"blocks"`
	// Digest is the XOR of splitmix64 over the block hashes held, in decimal: not
	// every reader of JSON can hold 64 bits as a number.
	Digest       uint64                     `json:"digest,string"`
	Requests     uint64                     `json:"requests"`
	Refused      uint64                     `json:"refused_requests,omitempty"`
	Cut          uint64                     `json:"cut_requests,omitempty"`
	PromptTokens uint64                     `json:"prompt_tokens"`
	HitTokens    uint64                     `json:"hit_tokens"`
	HitRate      float64                    `json:"hit_rate"`
	Faults       map[simulator.Fault]uint64 `json:"faults,omitempty"`
}

// simulateReport tells what engines do.
type simulateReport struct {
	out  io.Writer
	json bool
}

func (r simulateReport) started(name string, e *simulator.Engine) error {
	s := engineStarted{Engine: name, Endpoint: e.Endpoint(), Replay: e.ReplayEndpoint()}
	if r.json {
		return json.NewEncoder(r.out).Encode(s)
	}
	replay := "no replay"
	if s.Replay != "" {
		replay = "replay at " + s.Replay
	}
	_, err := fmt.Fprintf(r.out, "%s publishes at %s, %s\n", s.Engine, s.Endpoint, replay)
	return err
}

// ended tells what one engine has done, and total what all have.
func (r simulateReport) ended(name string, sum simulator.Summary) error {
	return r.end(engineEnded{Engine: name}, sum)
}

func (r simulateReport) total(engines []*simulator.Engine) error {
	return r.end(engineEnded{Engine: "all", Engines: len(engines)}, totalOf(engines))
}

func totalOf(engines []*simulator.Engine) (sum simulator.Summary) {
	for _, e := range engines {
		sum.Add(e.Summary())
	}
	return sum
}

func (r simulateReport) end(s engineEnded, sum simulator.Summary) error {
	if r.json {
		s.Batches, s.Events = sum.Batches, sum.Events
		s.Stored, s.Removed, s.Blocks, s.Digest = sum.Stored, sum.Removed, sum.Blocks, sum.Digest
		s.Requests, s.Refused, s.Cut = sum.Requests, sum.Refused, sum.Cut
		s.PromptTokens, s.HitTokens, s.HitRate = sum.PromptTokens, sum.HitTokens, sum.HitRate()
		s.Faults = sum.Faults
		return json.NewEncoder(r.out).Encode(s)
	}
	name, hold, digest := s.Engine, "it holds", fmt.Sprintf(" with digest %016x", sum.Digest)
	if s.Engines > 0 {
		name, hold, digest = fmt.Sprintf("all %d engines", s.Engines), "they hold", ""
	}
	_, err := fmt.Fprintf(r.out, "%s published %d batches with %d events: %d blocks stored, %d removed; %s %d blocks%s; %s%s\n",
		name, sum.Batches, sum.Events, sum.Stored, sum.Removed, hold, sum.Blocks, digest, requestsText(sum), faultsText(sum))
	return err
}

func requestsText(sum simulator.Summary) string {
	text := fmt.Sprintf("%d requests, hit rate %.1f%% (%d of %d prompt tokens)",
		sum.Requests, 100*sum.HitRate(), sum.HitTokens, sum.PromptTokens)
	if sum.Refused > 0 {
		text += fmt.Sprintf(", %d refused as longer than the cache", sum.Refused)
	}
	if sum.Cut > 0 {
		text += fmt.Sprintf(", %d cut short", sum.Cut)
	}
	return text
}

func faultsText(sum simulator.Summary) string {
	var struck []string
	for _, f := range simulator.AllFaults() {
		if n := sum.Faults[f]; n > 0 {
			struck = append(struck, fmt.Sprintf("%s %d", f, n))
		}
	}
	if struck == nil {
		return ""
	}
	return "; faults: " + strings.Join(struck, ", ")
}

// simulateProgress tells how far engines are.
type simulateProgress struct {
	out      io.Writer
	engines  []*simulator.Engine
	requests int    // of their traces; 0 where there is none
	batches  uint64 // after which they end; 0 where there is no such number
}

// tell does so now and then, until the context ends: with a bar where there is room
// for one, and an end to come.
func (p simulateProgress) tell(ctx context.Context, every time.Duration, room bool) {
	if every == 0 {
		return
	}
	if room && p.requests > 0 {
		p.draw(ctx, uint64(p.requests), func(s simulator.Summary) uint64 { return s.Requests + s.Refused })
		return
	}
	if room && p.batches > 0 {
		p.draw(ctx, p.batches, func(s simulator.Summary) uint64 { return s.Batches })
		return
	}
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			_, _ = fmt.Fprintln(p.out, p.line(totalOf(p.engines)))
		}
	}
}

// draw draws a bar until the context ends.
func (p simulateProgress) draw(ctx context.Context, total uint64, done func(simulator.Summary) uint64) {
	bar := newProgressBar(p.out, total)
	defer bar.end()
	ticker := time.NewTicker(2 * progressEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			sum := totalOf(p.engines)
			bar.at(done(sum), fmt.Sprintf("%s batches, %s blocks held, hit rate %.1f%%", grouped(sum.Batches), grouped(uint64(sum.Blocks)), 100*sum.HitRate()))
		}
	}
}

func (p simulateProgress) line(sum simulator.Summary) string {
	of := ""
	if p.requests > 0 {
		of = fmt.Sprintf("%d%% of the trace, ", (sum.Requests+sum.Refused)*100/uint64(p.requests))
	}
	return fmt.Sprintf("kvcast: %s%d batches, %d events, %d blocks held, %s%s",
		of, sum.Batches, sum.Events, sum.Blocks, requestsText(sum), faultsText(sum))
}
