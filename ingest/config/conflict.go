package config

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
)

// SocketSet is the set of engines' sockets that workers read. A socket belongs to one dp rank of one source: a rank that reads another's
// events or replays would be said to have blocks that it does not have. The zero SocketSet is empty. It is not safe for concurrent use.
type SocketSet struct {
	users   map[socket][]socketUser // several only with topics of their own
	sockets map[string][]socket     // by worker
}

// socket is where an endpoint leads. Names of hosts are compared as they are written, since what they resolve to may change.
type socket struct {
	host string // or the path, for ipc
	port int    // 0 for ipc
}

// socketUser is who reads a socket, and what for.
type socketUser struct {
	worker   string
	source   int
	use      socketUse
	rank     uint32
	first    uint32 // rank of the source
	topic    string // prefix of the topics
	isCalled bool
}

// socketUse is what a socket is read for.
type socketUse string

const (
	useEvents    socketUse = "events"
	useReplays   socketUse = "replays"
	useSnapshots socketUse = "snapshots"
)

// Add adds the sockets of a valid worker. If another worker, or another source or rank of the worker, reads one of them, it
// adds nothing and returns a FieldError for each such field of Workers[0], joined. The errors name both workers.
func (s *SocketSet) Add(w Worker) error {
	var v Validation
	s.add(&v, "Workers[0]", w.withDefaults())
	return v.Err()
}

// Check returns what Add would return, and adds nothing.
func (s *SocketSet) Check(w Worker) error {
	err := s.Add(w)
	if err == nil {
		s.Remove(w.Name)
	}
	return err
}

// Remove removes the sockets of a worker, if there is one of that name.
func (s *SocketSet) Remove(worker string) {
	for _, at := range s.sockets[worker] {
		left := slices.DeleteFunc(s.users[at], func(u socketUser) bool { return u.worker == worker })
		if s.users[at] = left; len(left) == 0 {
			delete(s.users, at)
		}
	}
	delete(s.sockets, worker)
}

// add adds the sockets of a worker with defaults. If there are conflicts, it adds nothing, and one error for each field of a source to v.
func (s *SocketSet) add(v *Validation, field string, w Worker) {
	if s.users == nil {
		s.users, s.sockets = make(map[socket][]socketUser), make(map[string][]socket)
	}
	hasConflict := false
	for i, source := range w.Sources {
		ranks := source.Endpoints()
		for _, is := range []struct {
			use               socketUse
			field, configured string
			endpoint          func(RankEndpoints) string
		}{
			{useEvents, "Connect", source.Connect, func(r RankEndpoints) string { return r.Connect }},
			{useReplays, "Replay", source.Replay, func(r RankEndpoints) string { return r.Replay }},
			{useSnapshots, "Snapshot", source.Snapshot, func(r RankEndpoints) string { return r.Snapshot }},
		} {
			for n, r := range ranks {
				at, isCalled, ok := socketOf(is.endpoint(r))
				if !ok {
					continue
				}
				u := socketUser{worker: w.Name, source: i, use: is.use, rank: r.Rank, first: ranks[0].Rank, topic: source.Topic, isCalled: isCalled}
				if other := slices.IndexFunc(s.users[at], u.conflicts); other >= 0 {
					hasConflict = true
					name, value := fmt.Sprintf("%s.Sources[%d].", field, i), is.configured
					if len(source.Ranks) > 0 && is.use != useSnapshots {
						name, value = fmt.Sprintf("%sRanks[%d].", name, n), is.endpoint(r)
					}
					v.Check(false, name+is.field, value, u.wants(is.endpoint(r), s.users[at][other]))
					break
				}
				s.users[at] = append(s.users[at], u)
				s.sockets[w.Name] = append(s.sockets[w.Name], at)
			}
		}
	}
	if hasConflict {
		s.Remove(w.Name)
	}
}

// conflicts reports whether two users may not read one socket. They may if it is that of a server that is called, which has all ranks of
// a source, or that of a proxy from which each reads topics of its own.
func (u socketUser) conflicts(other socketUser) bool {
	isSource := u.worker == other.worker && u.source == other.source && u.use == other.use
	if isSource && u.isCalled && other.isCalled {
		return false
	}
	haveTopics := u.use == useEvents && other.use == useEvents && !isSource
	return !haveTopics || strings.HasPrefix(u.topic, other.topic) || strings.HasPrefix(other.topic, u.topic)
}

// wants describes an allowed endpoint in an error: one without the other user.
func (u socketUser) wants(endpoint string, other socketUser) string {
	const maxEndpoint = 100 // bytes of an endpoint in an error
	want := fmt.Sprintf("a socket of its own: %s would read the %s of rank %d at %.*s, where %s reads the %s of rank %d",
		u.name(), u.use, u.rank, maxEndpoint, endpoint, other.name(), other.use, other.rank)
	if u.rank != u.first || other.rank != other.first {
		want += "; leave room for the ports of all ranks"
	}
	return want
}

// name names the worker and, except for the first one, the source.
func (u socketUser) name() string {
	if u.source == 0 {
		return fmt.Sprintf("worker %q", u.worker)
	}
	return fmt.Sprintf("source %d of worker %q", u.source, u.worker)
}

// socketOf returns where a valid endpoint leads; ok is false if it is empty, or leads to nothing that belongs to one worker.
func socketOf(endpoint string) (at socket, isCalled, ok bool) {
	e, ok := ParseSource(endpoint)
	switch {
	case !ok, e.Transport == TransportWorkers, e.Transport == TransportLMCacheCoordinator: // which several may ask
		return socket{}, false, false
	case e.Transport == TransportIPC:
		return socket{host: e.Address}, false, true
	default:
		return socket{host: normalHost(e.Address), port: e.Port}, e.Called(), true
	}
}

// normalHost returns one form of a host for its spellings.
func normalHost(host string) string {
	if ip, err := netip.ParseAddr(host); err == nil {
		return ip.Unmap().String()
	}
	return strings.TrimSuffix(strings.ToLower(host), ".")
}

// normalHTTP returns one form of a valid Worker.HTTP for its spellings.
func normalHTTP(text string) string {
	u, err := url.Parse(text)
	if err != nil {
		return text
	}
	return net.JoinHostPort(normalHost(u.Hostname()), u.Port())
}
