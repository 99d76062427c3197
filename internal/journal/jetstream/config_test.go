package jetstream

import "testing"

func TestVersionsThatSyncCompaction(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]bool{
		"2.9.10": false, "2.14.5": false, "2.14.6": true, "2.14.10": true, "2.15.0": true, "3.0.0": true, "2.14.6-RC.1": true, "": true, "dev": true,
	} {
		if got := syncsCompaction(version); got != want {
			t.Errorf("%q: got %t", version, got)
		}
	}
}
