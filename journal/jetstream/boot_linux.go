package jetstream

import (
	"os"
	"strings"
)

// bootID returns a string that is different after each boot of the machine, or "" if it is unknown.
func bootID() string {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(id))
}
