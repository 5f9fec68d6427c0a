#!/bin/bash
# Runs two commands in two guests that are linked by their eth0: 10.7.0.1 and 10.7.0.2, each with a
# Soft-RoCE device rxe0.
#
#   tests/rxe/pair.sh [-f FILE]... [-t SECONDS] [-m MIB] [-s CPUS] [-e NAME=VALUE] 'FIRST' 'SECOND'
#
# Options are those of guest.sh; the default is one processor each. Each command starts once the other
# guest answers. Lines are marked [1] and [2]. Exit status: the second's if not 0, else the first's.
set -uo pipefail
here=$(dirname "$(readlink -f "$0")")
. "$here/lib.sh"
options=(-s 1)
while [ $# -gt 2 ]; do
    case $1 in
    -f | -t | -m | -s | -e | -d) options+=("$1" "$2"); shift 2 ;;
    *) die "unknown option $1; see the head of $0" ;;
    esac
done
[ $# -eq 2 ] || die "two commands are needed; see the head of $0"
[ -e "$(bed)/complete" ] || die "there is no test bed yet; run $here/build.sh"
work=$(mktemp -d /tmp/switchyard-pair.XXXXXX)
sides=()
cleanup() {
    for side in ${sides[@]+"${sides[@]}"}; do kill "$side" 2>/dev/null; done
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM
meet='n=0; until ping -c1 -W1 %s >/dev/null 2>&1; do n=$((n+1)); [ $n -lt 300 ] || { echo "%s does not answer"; exit 249; }; sleep 0.1; done; %s'
# Datagrams between Unix sockets are neither lost nor delayed; UDP loses some, TCP waits for Nagle.
side() {
    local mark=$1 own=$2 peer=$3 link=$4 command
    # shellcheck disable=SC2059
    printf -v command "$meet" "$peer" "$peer" "$5"
    "$here/guest.sh" "${options[@]}" -i "$own" -n "$link" -- "$command" 2>&1 | sed -u "s/^/[$mark] /"
    return "${PIPESTATUS[0]}"
}
side 1 10.7.0.1 10.7.0.2 "$work/a:$work/b" "$1" &
sides+=($!)
side 2 10.7.0.2 10.7.0.1 "$work/b:$work/a" "$2" &
sides+=($!)
wait "${sides[1]}"
second=$?
wait "${sides[0]}"
first=$?
sides=()
say "first ended with $first, second with $second"
[ $second -ne 0 ] && exit $second
exit $first
