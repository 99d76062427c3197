package wire

import "github.com/tinylib/msgp/msgp"

// arrayWriter writes an array of at most 15 elements, or of most if that is not
// 0, whose header has one byte of room.
type arrayWriter struct {
	dst     []byte
	header  int
	n, most int
}

// put takes dst with one more element, or leaves it.
func (a *arrayWriter) put(dst []byte) {
	if a.most == 0 || a.n < a.most {
		a.dst = dst
		a.n++
	}
}

// mapWriter writes a map whose number of keys is not known before its end, and is
// less than 1<<16.
type mapWriter struct {
	dst []byte
	n   int
}

// close sets the header, which stands at dst[at] and has one byte of room.
func (m *mapWriter) close(at int) []byte {
	if m.n < 16 {
		m.dst[at] = 0x80 | byte(m.n)
		return m.dst
	}
	m.dst = append(m.dst, 0, 0)
	copy(m.dst[at+3:], m.dst[at+1:])
	m.dst[at], m.dst[at+1], m.dst[at+2] = 0xde, byte(m.n>>8), byte(m.n)
	return m.dst
}

func (m *mapWriter) key(name string) {
	m.n++
	m.dst = msgp.AppendString(m.dst, name)
}

func (m *mapWriter) string(name, v string) {
	if v != "" {
		m.key(name)
		m.dst = msgp.AppendString(m.dst, v)
	}
}

func (m *mapWriter) int(name string, v int64, has bool) {
	if has {
		m.key(name)
		m.dst = msgp.AppendInt64(m.dst, v)
	}
}

func (m *mapWriter) raw(name string, v []byte) {
	if v != nil {
		m.key(name)
		m.dst = append(m.dst, v...)
	}
}

func appendInt(dst []byte, v int64, has bool) []byte {
	if !has {
		return msgp.AppendNil(dst)
	}
	return msgp.AppendInt64(dst, v)
}

func appendString(dst []byte, s string) []byte {
	if s == "" {
		return msgp.AppendNil(dst)
	}
	return msgp.AppendString(dst, s)
}

func appendRaw(dst, v []byte) []byte {
	if v == nil {
		return msgp.AppendNil(dst)
	}
	return append(dst, v...)
}
