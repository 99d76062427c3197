package transport_test

import (
	"fmt"
	"testing"

	"github.com/kvcast/kvcast/internal/transport"
)

// TestDroppedTopicsAreBounded checks that of many dropped topics some are recorded by name, and
// the others by connection.
func TestDroppedTopicsAreBounded(t *testing.T) {
	var d transport.Drops
	drop := func(topic string, conn int) {
		d.Add(transport.Message{Frames: [][]byte{[]byte(topic), make([]byte, 8), {}}, Count: 3, Conn: conn})
	}
	for i := range 1024 {
		drop(fmt.Sprint(i, "\x00suffix"), 1)
	}
	if d.MayInclude("other", 1, 2) {
		t.Error("a message of another topic may be included")
	}
	drop("one too many", 2)
	for _, tt := range []struct {
		topic       string
		connections []int
		want        bool
	}{{"0", nil, true}, {"1023", nil, true}, {"one too many", []int{2}, true}, {"other", []int{1}, false}, {"other", []int{1, 2}, true}} {
		if got := d.MayInclude(tt.topic, tt.connections...); got != tt.want {
			t.Errorf("MayInclude(%q, %v) = %v, want %v", tt.topic, tt.connections, got, tt.want)
		}
	}
}
