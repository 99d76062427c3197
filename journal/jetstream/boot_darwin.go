package jetstream

import "golang.org/x/sys/unix"

// bootID returns a string that is different after each boot of the machine, or "" if it is unknown.
func bootID() string {
	id, err := unix.Sysctl("kern.bootsessionuuid")
	if err != nil {
		return ""
	}
	return id
}
