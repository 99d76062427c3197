# Functions of scripts that prepare what may be missing; to be read by them.

# The standard error of the script: limited writes progress to it while a command writes to its log.
exec 3>&2

# Python compiles what is imported, then: most of the packages that pip installs is not.
export PIP_NO_COMPILE=1

# limited COMMAND... runs a command for at most half an hour, ten times what two slow cores need for the longest one. Every
# 15 seconds it says that the command goes on, and names $log, where callers write the output. After half an hour it says so and
# returns 124.
limited() {
	limit=1800 waited=0 status=0
	"$@" &
	pid=$!
	while kill -0 $pid 2>/dev/null; do
		sleep 1
		waited=$((waited + 1))
		[ $((waited % 15)) != 0 ] || echo "  $waited s so far; output: $log" >&3
		if [ $waited = $limit ]; then
			kill $pid
			wait $pid || true
			echo "error: not done after $limit s"
			return 124
		fi
	done
	wait $pid || status=$?
	return $status
}

# reason LOG prints the first error in the output of a command, or else its last line.
reason() { grep -i -m 1 error "$1" || tail -n 1 "$1"; }
