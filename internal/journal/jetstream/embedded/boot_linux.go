package embedded

import (
	"os"
	"strings"
)

// BootID returns a string that is different after each boot of the machine, or "" if it is unknown.
func BootID() string {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(id))
}
