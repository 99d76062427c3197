#!/bin/sh
# cgo.sh [GO] prints 1 if kvcast can be built with cgo, and so with libzmq, and 0 if not. Then it prints
# the reason and what to do to stderr. CGO_ENABLED=0 builds without, CGO_ENABLED=1 with cgo in any case.
set -eu
go=${1:-go}

# without REASON
without() {
	echo 0
	cat >&2 <<-END
		building without cgo: $1
		Left out: the libzmq transport (for engines with libzmq 3 or older), the race detector, and tests with libzmq.
	END
	exit 0
}

case ${CGO_ENABLED-} in
0) without "CGO_ENABLED is 0" ;;
1)
	echo 1
	exit 0
	;;
esac
compiler=$($go env CC)
command -v "${compiler%% *}" >/dev/null 2>&1 ||
	without "there is no C compiler ($compiler): run 'make libzmq' to install it and libzmq"
[ "$($go env CGO_ENABLED)" = 1 ] || without "'go env CGO_ENABLED' is not 1"
command -v pkg-config >/dev/null 2>&1 || without "pkg-config is missing: run 'make libzmq' to install it and libzmq"
pkg-config --exists 'libzmq >= 4.3' || without "libzmq 4.3 or later is missing, or its headers are: run 'make libzmq' to install them"
echo 1
