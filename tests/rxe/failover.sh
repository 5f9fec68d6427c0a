#!/bin/bash
# One of two expert servers is cut off while text is generated through both, over RDMA between two guests.
#
#   tests/rxe/failover.sh SWITCHYARD MODEL_FOLDER
#
# SWITCHYARD is a binary with the feature `verbs`, MODEL_FOLDER the small model of the repository with its
# reference text. The first guest runs the server `far`, the second the control plane, the server `near`
# and the client. In mid-text the first guest takes its link down. Passes if the text is that of the
# reference, no request was lost or counted twice, and the failure was noticed.
set -uo pipefail
here=$(dirname "$(readlink -f "$0")")
. "$here/lib.sh"
[ $# -eq 2 ] || die "usage: $0 SWITCHYARD MODEL_FOLDER"
binary=$1 model=$(readlink -f "$2")
work=$(mktemp -d /tmp/switchyard-failover.XXXXXX)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
mkdir "$work/share"
cp "$model"/*.json "$model"/*.safetensors "$work/share/"
python3 - "$model/golden.json" "$work/share" <<'PY' || die "golden.json has not the expected form"
import json, sys
prompt = json.load(open(sys.argv[1]))["prompts"][0]
num_new = len(prompt["greedy_f32"]) - len(prompt["ids"])
open(sys.argv[2] + "/prompt", "w").write(prompt["text"])
json.dump(prompt["greedy_f32"][len(prompt["ids"]):], open(sys.argv[2] + "/expected", "w"))
open(sys.argv[2] + "/count", "w").write(str(num_new))
PY
cat >"$work/share/first" <<'SH'
cp -r /mnt /tmp/model
# The guests share a network with nothing else.
export SWITCHYARD_INSECURE=1
./switchyard expert-server --name far --model /tmp/model --listen 10.7.0.1:7171 >/mnt/far.log 2>&1 &
# The other side says when.
nc -l -p 9000 >/dev/null
echo "cutting the link"
ip link set eth0 down
sleep 60 &
wait $!
SH
cat >"$work/share/second" <<'SH'
wait_for() { # what, command...
    what=$1; shift; n=0
    until "$@" >/dev/null 2>&1; do
        n=$((n + 1)); [ $n -lt 1200 ] || { echo "waited in vain for $what"; exit 1; }
        sleep 0.1
    done
}
cp -r /mnt /tmp/model
export SWITCHYARD_INSECURE=1 SWITCHYARD_DEADLINE_MS=2000
# An emulated processor may be busy with something else for so long.
[ "$SWITCHYARD_RXE_ACCEL" != tcg ] || export SWITCHYARD_DEADLINE_MS=8000
./switchyard control-plane --listen 10.7.0.2:7070 --servers 2 --replicas 2 --lease-ttl-ms 10000 >/mnt/control.log 2>&1 &
./switchyard expert-server --name near --model /tmp/model --listen 10.7.0.2:7171 >/mnt/near.log 2>&1 &
both() { ./switchyard status --json >/tmp/status && grep -q '"far"' /tmp/status && grep -q '"near"' /tmp/status; }
wait_for "two servers" both
cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts >/tmp/packets
./switchyard generate --json --model /tmp/model --prompt "$(cat /mnt/prompt)" --max-new-tokens "$(cat /mnt/count)" \
    --wire-dtype f32 --temperature 0 --log info >/tmp/out 2>/mnt/client.log &
client=$!
moved() { [ $(($(cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts) - $(cat /tmp/packets))) -gt 1200 ]; }
is_cut() { ! ping -c1 -W1 10.7.0.1; }
wait_for "frames by RDMA" moved
# The client stands still until the link is down: the text is not over before.
kill -STOP $client
echo now | nc 10.7.0.1 9000
wait_for "the cut" is_cut
kill -CONT $client
wait $client
code=$?
echo "client ended with $code, $(($(cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts) - $(cat /tmp/packets))) packets sent"
cp /tmp/out /mnt/out
exit $code
SH
common=(-m 1536 -t 600 -d "$work/share" -f "$binary:switchyard"
    -e NO_COLOR=1 -e SWITCHYARD_TRANSPORT=verbs -e SWITCHYARD_CONTROL_PLANE=http://10.7.0.2:7070 -e SWITCHYARD_TOKEN=rxe)
"$here/pair.sh" "${common[@]}" 'sh /mnt/first & n=0; until [ -e /mnt/out ] || [ $n -ge 1100 ]; do sleep 0.5; n=$((n+1)); done; exit 0' 'sh /mnt/second'
code=$?
if [ $code -ne 0 ]; then
    tail -n 20 "$work"/share/*.log >&2
    die "the guests ended with $code"
fi
grep -q 'frames unanswered; they go to replicas.*far' "$work/share/client.log" || {
    cat "$work/share/client.log" >&2
    die "the client did not notice that \`far\` was cut off"
}
python3 - "$work/share" <<'PY'
import json, sys
folder = sys.argv[1]
report, expected = (json.load(open(f"{folder}/{name}")) for name in ("out", "expected"))
found = report["token_ids"]
for count in "lost_requests", "duplicated_requests":
    if report[count] != 0:
        sys.exit(f"rxe: `{count}` is {report[count]}, expected 0")
if found != expected:
    sys.exit(f"rxe: the tokens differ from the reference\nfound    {found}\nexpected {expected}")
print(f"all {len(found)} tokens are those of the reference, {report['tokens_per_s']:.1f} tokens/s")
PY
