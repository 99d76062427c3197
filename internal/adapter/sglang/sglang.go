// Package sglang answers MatchExternalKvPrefix, with which SGLang's routers ask SGLang's KV indexer which workers hold a prompt.
//
// In: an engine's hashes of a prompt's blocks, and an index. Out: the address of each worker that holds the first block, and how
// many blocks it holds without a gap. Guarantee: an answer is exact at one seq of the index. Config.Acquire bounds the requests that
// are answered and that wait.
package sglang

import (
	"context"
	"log/slog"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/loglimit"
	"github.com/kvcast/kvcast/internal/peer"
	kvindexerv1 "github.com/kvcast/kvcast/internal/peer/kv_indexer/v1"
	"github.com/kvcast/kvcast/server/match"
)

const (
	// maxHashes bounds the blocks that are looked up for a request, as for MatchPrefix.
	maxHashes = 1 << 16
	// requestBytes is about the memory of a request without its hashes.
	requestBytes = 16 << 10
	// maxReusedBlocks bounds the prompts whose memory is kept for reuse.
	maxReusedBlocks = 16 << 10
)

// Config configures a Service.
type Config struct {
	// Address is the pattern of addresses by which routers know workers: {endpoint} is replaced by a worker's address for
	// requests, and {worker} by its name. A worker without an address for requests has none if the pattern has {endpoint}. An
	// address for requests that has a scheme is used as it is, if the pattern ends with {endpoint}.
	Address string
	// Addresses are the addresses of workers, by name, in the place of the pattern.
	Addresses map[string]string
	// Acquire waits until a request with some bytes of memory may be answered, and returns a function that ends the answer, or
	// the error for the client.
	Acquire func(ctx context.Context, bytes int64) (release func(), err error)
	// Ready returns why requests cannot be answered yet; empty if they can.
	Ready  func() string
	Logger *slog.Logger
}

// Service implements kvindexerv1.KVIndexerServer.
type Service struct {
	kvindexerv1.UnimplementedKVIndexerServer
	cfg     Config
	index   *index.Index
	unknown loglimit.Keys // names of workers without an address
}

// New returns a service.
func New(c Config, x *index.Index) *Service {
	return &Service{cfg: c, index: x}
}

// found is the memory of a match, for reuse.
var found = sync.Pool{New: func() any { return new(index.Matches) }}

// MatchExternalKvPrefix implements kvindexerv1.KVIndexerServer.
func (s *Service) MatchExternalKvPrefix(ctx context.Context, req *kvindexerv1.MatchExternalKvPrefixRequest) (*kvindexerv1.MatchExternalKvPrefixResponse, error) {
	if why := s.cfg.Ready(); why != "" {
		return nil, status.Error(codes.Unavailable, "kvcast does not know the engines' caches: "+why)
	}
	release, err := s.cfg.Acquire(ctx, requestBytes+2*int64(proto.Size(req))) // matching takes no more than the request
	if err != nil {
		return nil, err
	}
	defer release()
	hashes := req.GetHashes()
	if most := req.GetMaxBlocks(); most != 0 && uint64(len(hashes)) > most {
		hashes = hashes[:most]
	}
	switch err := peer.CheckTypes(req); {
	case err != nil:
		return nil, status.Errorf(codes.InvalidArgument, "the request cannot be decoded: %v", err)
	case len(hashes) > maxHashes:
		return nil, status.Errorf(codes.InvalidArgument, "%d blocks are more than the limit of %d: set max_blocks, or send fewer hashes", len(hashes), maxHashes)
	}
	m := found.Get().(*index.Matches)
	if len(hashes) <= maxReusedBlocks {
		defer found.Put(m)
	}
	s.index.Match(&index.Query{Prompts: []index.Prompt{{BlockHashes: hashes}}, MaxLookups: match.MaxLookups}, m)
	if m.Exceeded {
		return nil, status.Errorf(codes.InvalidArgument, "these blocks have unknown content, and need more than %d lookups in all workers: send fewer hashes", match.MaxLookups)
	}
	return s.answer(m.Prompts[0], len(hashes)), nil
}

// answer returns matches, the longest first. Of the dp ranks of a worker, which have one address, the one with the longest
// prefix counts.
func (s *Service) answer(all []index.Match, blocks int) *kvindexerv1.MatchExternalKvPrefixResponse {
	a := &kvindexerv1.MatchExternalKvPrefixResponse{BlocksRead: uint32(blocks)}
	listed := make(map[string]struct{}, len(all))
	for i := range all {
		m := &all[i]
		if _, ok := listed[m.Worker]; ok || m.Blocks == 0 {
			continue
		}
		listed[m.Worker] = struct{}{}
		address := s.address(m)
		if address == "" {
			s.logUnknown(m.Worker)
			continue
		}
		a.BestPrefixBlocks = max(a.BestPrefixBlocks, uint32(m.Blocks))
		a.Matches = append(a.Matches, &kvindexerv1.PrefixMatch{WorkerAddress: address, MatchedPrefixBlocks: uint32(m.Blocks), WorkerId: m.Worker})
	}
	return a
}

// address returns the address by which routers know a worker; empty if it has none.
func (s *Service) address(m *index.Match) string {
	if address, ok := s.cfg.Addresses[m.Worker]; ok {
		return address
	}
	if strings.Contains(s.cfg.Address, "{endpoint}") {
		switch {
		case m.Endpoint == "":
			return ""
		case strings.Contains(m.Endpoint, "://") && strings.HasSuffix(s.cfg.Address, "{endpoint}"):
			return m.Endpoint
		}
	}
	return strings.NewReplacer("{endpoint}", m.Endpoint, "{worker}", m.Worker).Replace(s.cfg.Address)
}

// logUnknown logs once that a worker has no address.
func (s *Service) logUnknown(worker string) {
	if !s.unknown.IsNew(worker) {
		return
	}
	s.cfg.Logger.Warn("worker is left out of answers to SGLang's routers, because it has no address: set its endpoint, or an element of egress.sglang.workers",
		"worker", worker)
}
