# Functions of scripts that prepare what may be missing; to be read by them.

# limited COMMAND... runs a command for at most five minutes. If that is not enough, it says so and
# returns 124.
limited() {
	if ! command -v timeout >/dev/null 2>&1; then
		"$@"
		return
	fi
	status=0
	timeout 300 "$@" || status=$?
	[ $status != 124 ] || echo "error: not done after five minutes"
	return $status
}

# reason LOG prints the first error in the output of a command, or else its last line.
reason() { grep -i -m 1 error "$1" || tail -n 1 "$1"; }
