// Package gorunner is the runner of the Go client.
package gorunner

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// object is a line of JSON.
type object map[string]any

// job is what the client is asked to do.
type job struct {
	Targets, Token string
	CAFile         string `json:"ca_file"`
	ClientID       string `json:"client_id"`
	Calls          []call
}

// call is one part of a job, with the fields of its kind.
type call struct {
	Call             string
	Options          options
	Updates          int
	ResnapshotAfter  int `json:"resnapshot_after"`
	Wait             int `json:"wait_ms"`
	Prompts          []prompt
	Request          request
	Requests         []request
	BlockHashes      []hash `json:"block_hashes"`
	TokensHashes     []hash `json:"tokens_hashes"`
	Filter           json.RawMessage
	Outcomes         []outcome
	Routed           []routed
	Tokens           []uint32
	BlockSize        int `json:"block_size"`
	LoRA, Salt, Text string
}

// hash is a number as text.
type hash uint64

func (h *hash) UnmarshalText(text []byte) error {
	n, err := strconv.ParseUint(string(text), 10, 64)
	*h = hash(n)
	return err
}

func numbers(all []hash) (out []uint64) {
	for _, h := range all {
		out = append(out, uint64(h))
	}
	return out
}

type options struct {
	Start     string
	After     client.Position
	GapPolicy string `json:"gap_policy"`
	Filter    json.RawMessage
	Digests   bool
	Idle      int `json:"idle_timeout_ms"`
	Min       int `json:"backoff_min_ms"`
	Max       int `json:"backoff_max_ms"`
}

type prompt struct {
	Tokens           []uint32
	BlockSize        int `json:"block_size"`
	LoRA, Salt       string
	Eagle            bool
	ExcludeLastToken bool   `json:"exclude_last_token"`
	TokensHashes     []hash `json:"tokens_hashes"`
	BlockHashes      []hash `json:"block_hashes"`
	Model            string
}

func (p *prompt) export(model string) client.Prompt {
	return client.Prompt{
		Model: cmp.Or(p.Model, model), Tokens: p.Tokens, BlockSize: p.BlockSize, LoRA: p.LoRA, Salt: p.Salt, Eagle: p.Eagle,
		ExcludeLastToken: p.ExcludeLastToken, TokensHashes: numbers(p.TokensHashes), BlockHashes: numbers(p.BlockHashes),
	}
}

type request struct {
	Model       string
	Prompts     []prompt
	Workers     []string
	Limit       int
	After       client.Position
	MaxWait     int `json:"max_wait_ms"`
	BlockHashes int `json:"max_block_hashes"`
}

func (r *request) export() client.MatchRequest {
	out := client.MatchRequest{
		Workers: r.Workers, Limit: r.Limit, After: r.After, MaxWait: time.Duration(r.MaxWait) * time.Millisecond, BlockHashes: r.BlockHashes,
	}
	for i := range r.Prompts {
		out.Prompts = append(out.Prompts, r.Prompts[i].export(r.Model))
	}
	return out
}

type outcome struct {
	Worker            string
	Rank              uint32
	Position          client.Position
	Predicted, Reused int
	Trust             string
}

type routed struct {
	Worker string
	Rank   uint32
	Prompt prompt
	TTL    int `json:"ttl_ms"`
}

// Run does the jobs that come from in, until it ends, and reports to out.
func Run(ctx context.Context, in io.Reader, out io.Writer) error {
	r := &runner{out: json.NewEncoder(out)}
	jobs := bufio.NewReader(in)
	for {
		line, err := jobs.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		var j job
		if err := json.Unmarshal(line, &j); err != nil {
			return err
		}
		if err := r.job(ctx, &j); err != nil {
			return err
		}
		r.report(object{"end": true})
	}
}

type runner struct {
	out      *json.Encoder
	clientID string
}

func (r *runner) report(o object) {
	if err := r.out.Encode(o.compact()); err != nil {
		panic(err)
	}
}

// compact removes values that say nothing.
func (o object) compact() object {
	for key, value := range o {
		switch value {
		case "", 0, false, uint32(0):
			delete(o, key)
		}
	}
	return o
}

func (r *runner) job(ctx context.Context, j *job) error {
	r.clientID = j.ClientID
	creds := insecure.NewCredentials()
	if j.CAFile != "" {
		var err error
		if creds, err = credentials.NewClientTLSFromFile(j.CAFile, ""); err != nil {
			return err
		}
	}
	dial := []grpc.DialOption{grpc.WithTransportCredentials(creds)}
	if j.Token != "" {
		dial = append(dial, grpc.WithPerRPCCredentials(token(j.Token)))
	}
	c, err := client.New(j.Targets, dial...)
	if err != nil {
		return err
	}
	for i := range j.Calls {
		if err := r.call(ctx, c, &j.Calls[i]); err != nil {
			return err
		}
	}
	return nil
}

// token is sent with each call.
type token string

func (t token) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(t)}, nil
}

func (t token) RequireTransportSecurity() bool { return false }

func (r *runner) call(ctx context.Context, c *client.Client, do *call) error {
	filter := new(kvcastv1.Filter)
	if do.Filter == nil {
		filter = nil
	} else if err := protojson.Unmarshal(do.Filter, filter); err != nil {
		return err
	}
	switch do.Call {
	case "subscribe":
		return r.subscribe(ctx, c, do)
	case "view":
		return r.view(ctx, c, do)
	case "match":
		res, err := c.MatchPrefix(ctx, do.Request.export())
		r.result(res, err)
	case "matches":
		r.matches(ctx, c, do)
	case "lookup":
		holders, err := c.LookupBlocks(ctx, client.Lookup{BlockHashes: numbers(do.BlockHashes), TokensHashes: numbers(do.TokensHashes), Filter: filter})
		r.messages("holders", exported(holders), err)
	case "workers":
		workers, err := c.Workers(ctx, filter)
		r.messages("workers", exported(workers), err)
	case "report_outcomes":
		var all []client.Outcome
		for _, o := range do.Outcomes {
			all = append(all, client.Outcome{
				Worker: o.Worker, Rank: o.Rank, Position: o.Position, Predicted: o.Predicted, Reused: o.Reused, Trust: kvcastv1.Trust(kvcastv1.Trust_value[o.Trust]),
			})
		}
		ignored, err := c.ReportOutcomes(ctx, all...)
		r.ignored(ignored, err)
	case "note_routed":
		var all []client.Routed
		for _, n := range do.Routed {
			all = append(all, client.Routed{Worker: n.Worker, Rank: n.Rank, Prompt: n.Prompt.export(""), TTL: time.Duration(n.TTL) * time.Millisecond})
		}
		ignored, err := c.NoteRouted(ctx, all...)
		r.ignored(ignored, err)
	case "tokens_hashes":
		all := []string{}
		for _, h := range client.TokensHashes(do.Tokens, do.BlockSize, do.LoRA, do.Salt) {
			all = append(all, strconv.FormatUint(h, 10))
		}
		r.report(object{"tokens_hashes": all})
	case "position":
		p, err := client.ParsePosition(do.Text)
		if err != nil {
			r.report(object{"error": "POSITION"})
			break
		}
		r.report(object{"epoch": p.Epoch, "seq": strconv.FormatUint(p.Seq, 10), "text": p.String()})
	default:
		return fmt.Errorf("call %q is not known", do.Call)
	}
	return nil
}

func (o *options) export() (client.Config, error) {
	milliseconds := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
	cfg := client.Config{
		Start: client.After(o.After), Digests: o.Digests,
		IdleTimeout: milliseconds(o.Idle), BackoffMin: milliseconds(o.Min), BackoffMax: milliseconds(o.Max),
	}
	switch o.Start {
	case "latest":
		cfg.Start = client.FromLatest()
	case "earliest":
		cfg.Start = client.FromEarliest()
	}
	if o.GapPolicy == "fail" {
		cfg.GapPolicy = client.GapFail
	}
	if o.Filter != nil {
		cfg.Filter = new(kvcastv1.Filter)
		return cfg, protojson.Unmarshal(o.Filter, cfg.Filter)
	}
	return cfg, nil
}

func (r *runner) subscribe(ctx context.Context, c *client.Client, do *call) error {
	cfg, err := do.Options.export()
	if err != nil {
		return err
	}
	cfg.ClientID = r.clientID
	n := 0
	for u, err := range c.Subscribe(ctx, cfg) {
		if err != nil {
			r.fail(err)
			break
		}
		r.update(u)
		if n++; n == do.ResnapshotAfter {
			u.Resnapshot(errRejected)
		}
		if n == do.Updates {
			break
		}
	}
	return nil
}

// errRejected is the cause of snapshots that the runner requests.
var errRejected = errors.New("the caller rejects its state")

func (r *runner) update(u client.Update) {
	o := object{}
	if !u.Position.IsZero() {
		o["position"] = u.Position.String()
	}
	if i := u.Interruption; i != nil {
		o["interruption"], o["snapshot"], o["failures"] = why(i.Err), i.Snapshot, i.Failures
		r.report(o)
		return
	}
	m := u.Message
	switch {
	case m.GetAccepted() != nil:
		o["update"], o["mode"] = "accepted", m.GetAccepted().GetMode().String()
	case m.GetProgress() != nil:
		o["update"] = "progress"
	case m.GetSnapshotBegin() != nil:
		o["update"] = "snapshot_begin"
	case m.GetSnapshotWorker() != nil:
		o["update"], o["worker"] = "snapshot_worker", m.GetSnapshotWorker().GetWorker()
	case len(m.GetSnapshotBlocks()) > 0:
		o["update"] = "snapshot_blocks"
	case m.GetSnapshotEnd() != nil:
		o["update"] = "snapshot_end"
	case len(m.GetEntries()) > 0:
		var seqs []string
		for _, e := range m.GetEntries() {
			seqs = append(seqs, strconv.FormatUint(e.GetSeq(), 10))
		}
		o["update"], o["seqs"] = "entries", seqs
	default:
		o["update"] = "unknown"
	}
	r.report(o)
}

// why names an error.
func why(err error) string {
	var (
		answer    *client.Error
		violation *client.ViolationError
		config    *client.ConfigError
	)
	switch {
	case errors.As(err, &violation):
		return "VIOLATION"
	case errors.As(err, &config):
		return "CONFIG"
	case errors.Is(err, client.ErrIdle):
		return "IDLE"
	case errors.Is(err, client.ErrEnded):
		return "ENDED"
	case errors.Is(err, errRejected):
		return "REJECTED"
	case errors.As(err, &answer):
		name := code.Code_name[int32(answer.Code)]
		if answer.Reason != "" {
			name += "/" + answer.Reason
		}
		return name
	}
	return "OTHER: " + err.Error()
}

func (r *runner) fail(err error) {
	o := object{"error": why(err)}
	var answer *client.Error
	if errors.As(err, &answer) && answer.Reason != "" {
		o["epoch"], o["retry_after_ms"] = answer.Epoch, int(answer.RetryAfter.Milliseconds())
		if answer.Newest > 0 {
			o["oldest"], o["newest"] = strconv.FormatUint(answer.Oldest, 10), strconv.FormatUint(answer.Newest, 10)
		}
	}
	r.report(o)
}

func (r *runner) view(ctx context.Context, c *client.Client, do *call) error {
	cfg, err := do.Options.export()
	if err != nil {
		return err
	}
	cfg.ClientID = r.clientID
	v := client.NewView()
	n := 0
	for u, err := range c.Subscribe(ctx, cfg) {
		if err != nil {
			r.fail(err)
			return nil
		}
		v.Apply(u)
		if n++; n == do.Updates {
			break
		}
	}
	time.Sleep(time.Duration(do.Wait) * time.Millisecond)
	var all [][]object
	for i := range do.Prompts {
		all = append(all, matches(v.Match(do.Prompts[i].export(""))))
	}
	r.report(object{"matches": all})
	return nil
}

func matches(all []client.Match) []object {
	out := []object{}
	for i := range all {
		m := &all[i]
		o := object{"worker": m.Worker, "rank": m.Rank, "blocks": m.Blocks, "tokens": m.Tokens, "trust": m.Trust.String(), "endpoint": m.Endpoint, "expected_blocks": m.Expected}
		tiers := object{}
		for tier, blocks := range m.TierBlocks {
			if blocks > 0 {
				tiers[kvcastv1.Tier(tier).String()] = blocks
			}
		}
		if len(tiers) > 0 {
			o["tiers"] = tiers
		}
		var reasons []string
		for _, reason := range m.Reasons {
			reasons = append(reasons, reason.String())
		}
		if reasons != nil {
			o["reasons"] = reasons
		}
		out = append(out, o.compact())
	}
	return out
}

func (r *runner) result(res client.MatchResult, err error) {
	if err != nil {
		r.fail(err)
		return
	}
	all := [][]object{}
	for _, prompt := range res.Matches {
		all = append(all, matches(prompt))
	}
	r.report(object{"position": res.Position.String(), "matches": all})
}

func (r *runner) matches(ctx context.Context, c *client.Client, do *call) {
	m := c.NewMatcher()
	defer m.Close()
	results := make([]client.MatchResult, len(do.Requests))
	errs := make([]error, len(do.Requests))
	var all sync.WaitGroup
	for i := range do.Requests {
		all.Go(func() { results[i], errs[i] = m.Match(ctx, do.Requests[i].export()) })
	}
	all.Wait()
	for i := range results {
		r.result(results[i], errs[i])
	}
}

func exported[M proto.Message](all []M) (out []proto.Message) {
	for _, m := range all {
		out = append(out, m)
	}
	return out
}

func (r *runner) messages(name string, all []proto.Message, err error) {
	if err != nil {
		r.fail(err)
		return
	}
	texts := []json.RawMessage{}
	for _, m := range all {
		text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
		if err != nil {
			panic(err)
		}
		texts = append(texts, text)
	}
	r.report(object{name: texts})
}

func (r *runner) ignored(n int, err error) {
	if err != nil {
		r.fail(err)
		return
	}
	r.report(object{"ignored": strconv.Itoa(n)})
}
