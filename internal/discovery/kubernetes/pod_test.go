package kubernetes

import (
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/watch"
)

// TestStoppedWatchEnds stops a watch that has an event which is not received. The bubble fails if a goroutine of the watch stays.
func TestStoppedWatchEnds(t *testing.T) {
	synctest.Test(t, func(*testing.T) {
		pods := watch.NewFake()
		w := Engines{}.trimmedWatch(pods)
		pods.Add(new(corev1.Pod))
		synctest.Wait()
		w.Stop()
	})
}
