// Package enginehttp asks engines at their HTTP servers where they publish KV-cache events.
//
// A worker with config.Worker.HTTP and one source goes in; it comes out with the ports, dp ranks, topic, block size and model that its
// engine tells. An engine of a version that cannot tell keeps the configured ones. What an answer may take is bounded in time and size,
// redirects are not followed, and only ports are taken from it: kvcast connects to no other host than the one that it has asked.
package enginehttp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
)

const (
	// timeout bounds a request. SGLang collects the state of all its schedulers for an answer.
	timeout = 5 * time.Second
	// maxBytes bounds an answer. SGLang's has all its options and states.
	maxBytes = 4 << 20
	// maxSmall is the size up to which an answer is read whatever others do, and maxLarge how many larger ones are read at a time.
	maxSmall, maxLarge = 256 << 10, 16
)

// large is a semaphore of answers of more than maxSmall.
var large = make(chan struct{}, maxLarge)

// errNotFound: the engine has no such path.
var errNotFound = errors.New("not found")

// client follows no redirects and uses no proxy, so that it reaches the engine and nothing else.
var client = &http.Client{
	Transport:     &http.Transport{DisableKeepAlives: true, MaxResponseHeaderBytes: 64 << 10},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}

// Ask returns the worker with what its engine reports about its source. It returns the worker unchanged, and reported is false,
// if the engine is of a version that reports nothing.
func Ask(ctx context.Context, w config.Worker) (_ config.Worker, reported bool, err error) {
	source := w.Sources[0]
	var answer answer
	if source.Engine == feed.EngineSGLang {
		answer, err = askSGLang(ctx, w.HTTP, source.FirstRank)
	} else {
		answer, err = askVLLM(ctx, w.HTTP)
	}
	switch {
	case errors.Is(err, errNotFound):
		return w, false, nil
	case err != nil:
		return w, false, fmt.Errorf("ask engine at %s: %w", w.HTTP, err)
	}
	server, err := url.Parse(w.HTTP)
	if err != nil {
		return w, false, fmt.Errorf("ask engine: %w", err)
	}
	if source.Ranks, err = answer.at(ctx, server.Hostname()); err != nil {
		return w, false, fmt.Errorf("engine at %s has endpoints that kvcast cannot connect to: %w", w.HTTP, err)
	}
	source.Connect, source.Replay, source.DPSize = source.Ranks[0].Connect, source.Ranks[0].Replay, len(source.Ranks)
	source.FirstRank = int(source.Ranks[0].Rank)
	if isConsecutive(source) {
		source.Ranks = nil
	}
	w.Sources = []config.Source{source}
	if w.BlockSize == 0 {
		w.BlockSize = answer.blockSize
	}
	if w.Model == "" && config.ValidModel(answer.model) {
		w.Model = answer.model
	}
	return w, true, nil
}

// answer is what an engine reports.
type answer struct {
	ranks     []config.RankEndpoints // as the engine binds them, by rank
	blockSize uint32                 // 0: not reported
	model     string                 // empty: not reported
}

// at returns the endpoints of the dp ranks with the engine's host.
func (a answer) at(ctx context.Context, host string) ([]config.RankEndpoints, error) {
	all := slices.Clone(a.ranks)
	for i := range all {
		for _, e := range []*string{&all[i].Connect, &all[i].Replay} {
			if *e == "" && e == &all[i].Replay {
				continue
			}
			reported, ok := config.ParseEndpoint(*e, true) // the host may be *
			if !ok || reported.Transport != config.TransportTCP || reported.Port == 0 {
				return nil, fmt.Errorf("%.200q; want tcp://*:PORT", *e)
			}
			if err := isAt(ctx, reported.Address, host); err != nil {
				return nil, fmt.Errorf("%.200q: %w", *e, err)
			}
			reported.Address = host
			*e = reported.String()
		}
	}
	return all, nil
}

// isConsecutive reports whether a source has the same dp ranks without Ranks.
func isConsecutive(s config.Source) bool {
	ranks := s.Ranks
	s.Ranks = nil
	return slices.Equal(s.Endpoints(), ranks)
}

// isAt returns nil if an endpoint's host is any address of the engine, or one that the engine's host name has.
func isAt(ctx context.Context, address, host string) error {
	if address == "*" || address == host {
		return nil
	}
	ip, err := netip.ParseAddr(address)
	if err == nil && ip.IsUnspecified() {
		return nil
	}
	if err == nil {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		of, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		if err != nil {
			return fmt.Errorf("look up the engine's host: %w", err)
		}
		if slices.ContainsFunc(of, func(a netip.Addr) bool { return a.Unmap() == ip.Unmap() }) {
			return nil
		}
	}
	return fmt.Errorf("this is not an address of %s; an engine that connects to kvcast needs a listener instead of http", host)
}

// askVLLM asks vLLM 0.33.0 or later. Its GET /kv_event_sources (vllm/entrypoints/serve/instrumentator/basic.py) answers with
// the KVEventsConfig (vllm/config/kv_events.py) of each dp rank, by rank, in which the endpoints have the rank's own ports.
func askVLLM(ctx context.Context, server string) (a answer, err error) {
	var sources vllmSources
	if err := get(ctx, server+"/kv_event_sources", &sources); err != nil {
		return answer{}, err
	}
	for _, number := range slices.Sorted(maps.Keys(sources)) {
		s := sources[number]
		if s.Publisher != "zmq" {
			return answer{}, fmt.Errorf("rank %d has the publisher %.100q; want zmq", number, s.Publisher)
		}
		r := config.RankEndpoints{Rank: number, Connect: s.Endpoint}
		if s.Replay != nil {
			r.Replay = *s.Replay
		}
		a.ranks = append(a.ranks, r)
	}
	return a, a.check()
}

// vllmSources are the sources of vLLM's dp ranks, by rank.
type vllmSources map[uint32]vllmSource

type vllmSource struct {
	Publisher string  `json:"publisher"`
	Endpoint  string  `json:"endpoint"`
	Replay    *string `json:"replay_endpoint"`
}

// UnmarshalJSON implements json.Unmarshaler. It fails at the first source beyond feed.MaxRanks: a map of as many as an answer has room for takes twenty times its memory.
func (v *vllmSources) UnmarshalJSON(text []byte) error {
	d := json.NewDecoder(bytes.NewReader(text))
	switch first, err := d.Token(); {
	case err != nil:
		return err
	case first == nil:
		return nil
	case first != json.Delim('{'):
		return errors.New("want a mapping of dp ranks")
	}
	*v = make(vllmSources)
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return err
		}
		var s vllmSource
		rank, err := strconv.ParseUint(key.(string), 10, 32)
		if err != nil {
			return fmt.Errorf("the key %.100q is no dp rank", key)
		}
		if err := d.Decode(&s); err != nil {
			return err
		}
		if (*v)[uint32(rank)] = s; len(*v) > feed.MaxRanks {
			return fmt.Errorf("more than %d dp ranks", feed.MaxRanks)
		}
	}
	return nil
}

// sleep is what an engine tells about whether it sleeps. A sleeping vLLM has discarded its cache, and publishes no event for that.
type sleep uint8

const (
	sleepUntold  sleep = iota // the engine never tells
	sleepUnknown              // it has not answered this time
	sleepNo
	sleepYes
)

// askSleep asks vLLM whether it sleeps: GET /is_sleeping (vllm/entrypoints/serve/sleep/api_router.py) is there if it can be sent to sleep.
func askSleep(ctx context.Context, server string) sleep {
	var answer struct {
		IsSleeping *bool `json:"is_sleeping"`
	}
	err := get(ctx, server+"/is_sleeping", &answer)
	switch {
	case errors.Is(err, errNotFound) || err == nil && answer.IsSleeping == nil:
		return sleepUntold
	case err != nil:
		return sleepUnknown
	case *answer.IsSleeping:
		return sleepYes
	default:
		return sleepNo
	}
}

// askSGLang asks SGLang. Its GET /server_info, in earlier versions /get_server_info, has the key kv_events with what
// describe_kv_events_publisher (python/sglang/srt/runtime_context.py of 0.5.23) returns. Versions without the key do not tell.
// None tells the first of its ranks, which is the configured one.
func askSGLang(ctx context.Context, server string, firstRank int) (a answer, err error) {
	var info struct {
		Model    string          `json:"served_model_name"`
		KVEvents json.RawMessage `json:"kv_events"`
	}
	err = get(ctx, server+"/server_info", &info)
	if errors.Is(err, errNotFound) {
		err = get(ctx, server+"/get_server_info", &info)
	}
	if err != nil {
		return answer{}, err
	}
	if info.KVEvents == nil {
		return answer{}, errNotFound
	}
	var events *struct {
		Publisher  string `json:"publisher"`
		Host       string `json:"endpoint_host"`
		Port       int    `json:"endpoint_port_base"`
		ReplayPort int    `json:"replay_endpoint_port_base"`
		BlockSize  uint32 `json:"block_size"`
		DPSize     int    `json:"dp_size"`
	}
	if err := json.Unmarshal(info.KVEvents, &events); err != nil {
		return answer{}, fmt.Errorf("decode kv_events: %w", quoted(err))
	}
	if events == nil {
		return answer{}, a.check()
	}
	if most := feed.MaxRanks - firstRank; events.Publisher != "zmq" || events.DPSize < 1 || events.DPSize > most {
		return answer{}, fmt.Errorf("kv_events has the publisher %.100q and the dp_size %d; want zmq and 1 to %d", events.Publisher, events.DPSize, most)
	}
	if events.BlockSize > wire.MaxBlockSize {
		return answer{}, fmt.Errorf("kv_events has the block_size %d; want at most %d", events.BlockSize, wire.MaxBlockSize)
	}
	a = answer{blockSize: events.BlockSize, model: info.Model}
	at := func(port, r int) string { return "tcp://" + events.Host + ":" + strconv.Itoa(port+r) } // an IPv6 host has brackets
	for r := range events.DPSize {
		rank := config.RankEndpoints{Rank: uint32(firstRank + r), Connect: at(events.Port, r)}
		if events.ReplayPort != 0 {
			rank.Replay = at(events.ReplayPort, r)
		}
		a.ranks = append(a.ranks, rank)
	}
	return a, nil
}

// check returns an error if the engine publishes nothing, or has too many ranks.
func (a answer) check() error {
	switch {
	case len(a.ranks) == 0:
		return errors.New("it publishes no KV-cache events: want --kv-events-config with the publisher zmq at the engine")
	case len(a.ranks) > feed.MaxRanks:
		return fmt.Errorf("it has %d dp ranks; want at most %d", len(a.ranks), feed.MaxRanks)
	case a.ranks[len(a.ranks)-1].Rank >= feed.MaxRanks:
		return fmt.Errorf("it has the dp rank %d; want 0 to %d", a.ranks[len(a.ranks)-1].Rank, feed.MaxRanks-1)
	}
	return nil
}

// get decodes the JSON at a URL. It returns errNotFound if there is none.
func get(ctx context.Context, at string, into any) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return err
	}
	path := request.URL.Path
	response, err := client.Do(request)
	var failed *url.Error
	if errors.As(err, &failed) {
		err = failed.Err // the caller has the URL
	}
	if err != nil {
		return fmt.Errorf("GET %s: %w", path, err)
	}
	defer func() { _ = response.Body.Close() }() // nothing is written
	switch {
	case response.StatusCode == http.StatusNotFound:
		return errNotFound
	case response.StatusCode != http.StatusOK:
		return fmt.Errorf("GET %s: status %d %s; want 200", path, response.StatusCode, http.StatusText(response.StatusCode))
	}
	body, err := io.ReadAll(io.LimitReader(response.Body, maxSmall+1))
	if err == nil && len(body) > maxSmall {
		select {
		case large <- struct{}{}:
			defer func() { <-large }()
		case <-ctx.Done():
			return fmt.Errorf("GET %s: wait for the large answers of other engines: %w", path, ctx.Err())
		}
		var rest []byte
		rest, err = io.ReadAll(io.LimitReader(response.Body, int64(maxBytes+1-len(body))))
		body = append(body, rest...)
	}
	if err != nil {
		return fmt.Errorf("GET %s: %w", path, err)
	}
	if len(body) > maxBytes {
		return fmt.Errorf("GET %s: the answer has more than %d MiB", path, maxBytes>>20)
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("GET %s: decode the answer: %w", path, quoted(err))
	}
	return nil
}

// quoted quotes the beginning of the number or the key that an error of json.Unmarshal has, which may be as long as the answer.
func quoted(err error) error {
	if wrong := new(json.UnmarshalTypeError); errors.As(err, &wrong) {
		wrong.Value = fmt.Sprintf("%.100q", wrong.Value)
	}
	return err
}
