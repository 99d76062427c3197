package server

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"time"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/history"
	"github.com/kvcast/kvcast/internal/incident"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

const (
	defaultEntries  = 20      // entries in a ListEntriesResponse, if the request has no limit
	maxEntries      = 100     // the same at most
	maxEntriesBytes = 1 << 20 // of these entries, but for a single larger one
	// maxEntriesSearched bounds the entries that ListEntries examines, and entriesTurn those of one turn.
	maxEntriesSearched = 65_536
	entriesTurn        = 4096
	// maxChain is how many tokens hashes a prompt of MatchPrefix may have.
	maxChain = 65_536
)

// inspection implements kvcast.v1.InspectionService.
type inspection struct {
	kvcastv1.UnimplementedInspectionServiceServer
	*Server
}

func (s inspection) ListIncidents(ctx context.Context, req *kvcastv1.ListIncidentsRequest) (*kvcastv1.ListIncidentsResponse, error) {
	if n := req.GetLimit(); n > incident.MaxLimit {
		return nil, callerror.InvalidField(s.journal.Bounds(), "limit", "%d is not allowed: want at most %d", n, incident.MaxLimit)
	}
	for i, kind := range req.GetKinds() {
		if _, ok := kvcastv1.IncidentKind_name[int32(kind)]; !ok || kind == 0 || i >= len(kvcastv1.IncidentKind_name) {
			return nil, callerror.InvalidField(s.journal.Bounds(), "kinds", "%v is not allowed: want kinds of this version, each once", kind)
		}
	}
	release, err := s.queries.inspections.Acquire(ctx, s.journal.Bounds())
	if err != nil {
		return nil, err
	}
	defer release()
	return s.cfg.Incidents.List(req), nil
}

func (s inspection) GetHistory(_ context.Context, req *kvcastv1.GetHistoryRequest) (*kvcastv1.GetHistoryResponse, error) {
	out := &kvcastv1.GetHistoryResponse{IntervalNano: uint64(history.Interval)}
	if s.cfg.History != nil {
		out.Samples = s.cfg.History.Samples(req.GetWorker())
	}
	return out, nil
}

func (s inspection) ListEntries(ctx context.Context, req *kvcastv1.ListEntriesRequest) (*kvcastv1.ListEntriesResponse, error) {
	b := s.journal.Bounds()
	limit := int(req.GetLimit())
	switch {
	case limit > maxEntries:
		return nil, callerror.InvalidField(b, "limit", "%d is not allowed: want at most %d", limit, maxEntries)
	case limit == 0:
		limit = defaultEntries
	}
	release, err := s.queries.inspections.Acquire(ctx, b)
	if err != nil {
		return nil, err
	}
	defer release()
	seqs, searched, err := s.lastEntries(ctx, b, req.GetWorker(), limit)
	if err != nil {
		return nil, status.FromContextError(err).Err()
	}
	out := &kvcastv1.ListEntriesResponse{NewestSeq: b.Newest, SearchedAfter: searched}
	for i, bytes := 0, 0; i < len(seqs) && bytes < maxEntriesBytes; i++ {
		entry, err := s.entry(ctx, seqs[i])
		switch {
		case errors.Is(err, journal.ErrCompacted):
			out.SearchedAfter = seqs[i]
			return out, nil
		case err != nil:
			return nil, err
		}
		if bytes += proto.Size(entry); bytes <= maxEntriesBytes || i == 0 {
			out.Entries = append(out.Entries, entry)
		}
	}
	return out, nil
}

func (s inspection) GetChain(ctx context.Context, req *kvcastv1.GetChainRequest) (*kvcastv1.GetChainResponse, error) {
	if err := s.checkServing(); err != nil {
		return nil, err
	}
	release, err := s.queries.inspections.Acquire(ctx, s.journal.Bounds())
	if err != nil {
		return nil, err
	}
	defer release()
	tokens, model, ok := s.index.Chain(req.GetWorker(), req.GetDpRank(), req.GetBlockHash(), maxChain)
	if !ok {
		return &kvcastv1.GetChainResponse{}, nil
	}
	return &kvcastv1.GetChainResponse{TokensHashes: tokens, Model: model}, nil
}

// lastEntries returns the seqs of the last entries of a worker, or of all workers if the name is empty, the newest first, and
// the seq after which they were searched.
func (s *Server) lastEntries(ctx context.Context, b journal.Bounds, worker string, limit int) (seqs []uint64, after uint64, err error) {
	oldest := max(b.Oldest-1, b.Newest-min(b.Newest, maxEntriesSearched))
	for until := b.Newest; until > oldest && len(seqs) < limit; {
		after := max(oldest, until-min(until, entriesTurn))
		found, err := s.entriesBetween(ctx, after, until, worker)
		switch {
		case errors.Is(err, journal.ErrCompacted):
			return seqs, until, nil
		case err != nil:
			return nil, 0, err
		}
		slices.Reverse(found)
		seqs = append(seqs, found...)
		until = after
		if until > oldest && len(seqs) < limit {
			continue
		}
		oldest = until
	}
	return seqs[:min(len(seqs), limit)], oldest, nil
}

// entriesBetween returns the seqs of a worker's entries, ascending. It reads no entry: the filter notes them.
func (s *Server) entriesBetween(ctx context.Context, after, until uint64, worker string) (seqs []uint64, err error) {
	note := func(seq uint64, source *journal.Source, _ kvblock.Tiers) journal.Match {
		if worker == "" || source.Worker == worker {
			seqs = append(seqs, seq)
		}
		return journal.MatchNone
	}
	for after < until {
		chunk, err := s.journal.Read(ctx, journal.Query{After: after, Until: until, MaxBytes: 1, Filter: note})
		if err != nil {
			return nil, err
		}
		if chunk.Last == after {
			break
		}
		after = chunk.Last
	}
	return seqs, ctx.Err()
}

// entry returns an entry without token ids.
func (s *Server) entry(ctx context.Context, seq uint64) (*kvcastv1.Entry, error) {
	chunk, err := s.journal.Read(ctx, journal.Query{After: seq - 1, Until: seq, MaxBytes: 1})
	if err != nil {
		return nil, err
	}
	var message kvcastv1.SubscribeResponse
	if err := proto.Unmarshal(bytes.Join(chunk.Slices, nil), &message); err != nil || len(message.GetEntries()) != 1 {
		return nil, callerror.Bug(s.journal.Bounds())
	}
	entry := message.GetEntries()[0]
	for _, event := range entry.GetEvents() {
		if stored := event.GetStored(); stored != nil {
			stored.TokenIds = nil
		}
	}
	return entry, nil
}

// recordEnd remembers the end of a Subscribe stream.
func (s *Server) recordEnd(sub *subscriber, err error) {
	end := &kvcastv1.Incident{
		Kind: kvcastv1.IncidentKind_INCIDENT_KIND_SUBSCRIBER_LEFT, Peer: sub.status.GetPeer(), Seq: sub.seq.Load(),
		DurationNano: uint64(max(0, time.Now().UnixNano()-sub.status.GetStartTimeUnixNano())),
	}
	end.Behind = s.journal.Bounds().Newest - end.GetSeq() // the newest seq is read after seq, so it is not less
	if reason := callerror.ReasonOf(err); reason != "" {
		end.Kind, end.Reason = kvcastv1.IncidentKind_INCIDENT_KIND_SUBSCRIBER_ENDED, reason
	}
	s.cfg.Incidents.Add(end)
}
