package embedded

import "golang.org/x/sys/unix"

// BootID returns a string that is different after each boot of the machine, or "" if it is unknown.
func BootID() string {
	id, err := unix.Sysctl("kern.bootsessionuuid")
	if err != nil {
		return ""
	}
	return id
}
