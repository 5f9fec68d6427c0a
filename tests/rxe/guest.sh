#!/bin/bash
# Runs a command in a QEMU guest that has a Soft-RoCE device rxe0.
#
#   tests/rxe/guest.sh [options] -- command [argument...]
#
#   -f FILE[:NAME]   put FILE, with the shared libraries it needs, into the guest's /w (repeatable)
#   -d FOLDER        mount FOLDER at /mnt, writable
#   -e NAME=VALUE    environment of the command (repeatable)
#   -t SECONDS       limit on the whole run, boot included (default 120)
#   -m MIB           memory (default 1024)
#   -s CPUS          processors (default 2)
#   -i ADDRESS       address of eth0 (default 10.7.0.1)
#   -2               give it another network device, eth1, for a second RDMA device
#   -n OWN:PEER      link eth0 with another guest: two Unix datagram sockets
#   -q               no closing line on stderr
#
# Output of the command goes to stdout as it comes. Exit status: the command's; 124 at the limit; 250
# when the guest did not get as far. A single argument is taken as a shell command line.
# SWITCHYARD_RXE_ACCEL=kvm|tcg chooses how the processor is provided; by default kvm if it works here. The
# command finds in it what was chosen.
set -uo pipefail
here=$(dirname "$(readlink -f "$0")")
. "$here/lib.sh"

limit=120 memory=1024 cpus=2 address=10.7.0.1 link='' share='' quiet='' files=() environment=() second=()
while getopts f:d:e:t:m:s:i:n:2q option; do
    case $option in
    f) files+=("$OPTARG") ;; d) share=$(readlink -f "$OPTARG") ;; e) environment+=("$OPTARG") ;;
    t) limit=$OPTARG ;; m) memory=$OPTARG ;; s) cpus=$OPTARG ;; i) address=$OPTARG ;;
    n) link=$OPTARG ;; 2) second=(-netdev hubport,id=n1,hubid=1 -device virtio-net-pci,netdev=n1,romfile=) ;; q) quiet=1 ;; *) sed -n '2,/^set/p' "$0" | sed '/^set/d' >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || die "no command given; see the head of $0"
bed=$(bed)
[ -e "$bed/complete" ] || die "there is no test bed yet; run $here/build.sh"

accel() {
    if [ -n "${SWITCHYARD_RXE_ACCEL:-}" ]; then echo "$SWITCHYARD_RXE_ACCEL"; return; fi
    # A device file proves little inside containers and nested machines: try it.
    if [ -w /dev/kvm ] && [ ! -e "$bed/no-kvm" ]; then
        if [ -e "$bed/kvm-works" ]; then echo kvm; return; fi
        # What was only slow may work another day.
        if [ -n "$(find "$bed/kvm-silent" -mmin -60 2>/dev/null)" ]; then echo tcg; return; fi
        timeout 10 qemu-system-x86_64 -nodefaults -no-user-config \
            -accel kvm -m 64 -display none -no-reboot -kernel "$bed/vmlinux" -append "panic=-1 quiet" \
            </dev/null >/dev/null 2>&1
        case $? in
        0) touch "$bed/kvm-works"; echo kvm; return ;;
        124) touch "$bed/kvm-silent"; say "KVM gave no answer in 10 s: emulating the processor" ;;
        *) touch "$bed/no-kvm" ;;
        esac
    fi
    echo tcg
}

accel=$(accel)
case $accel in
kvm) processor=(-accel kvm -cpu host) ;;
tcg) processor=(-accel tcg,thread=multi -cpu max,la57=off) ;;
*) die "SWITCHYARD_RXE_ACCEL is \`$accel\`, expected kvm or tcg" ;;
esac

work=$(mktemp -d /tmp/switchyard-rxe.XXXXXX)
qemu='' reader=''
cleanup() {
    [ -n "$qemu" ] && kill -9 "$qemu" 2>/dev/null
    [ -n "$reader" ] && kill "$reader" 2>/dev/null
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

mkdir -p "$work/add/w"
for file in ${files[@]+"${files[@]}"}; do
    source=${file%%:*} name=$(basename "${file#*:}")
    [ -r "$source" ] || die "cannot read $source"
    copy_with_libraries "$source" "$work/add/w/$name" "$bed/root" "$work/add"
    [ -x "$source" ] && chmod +x "$work/add/w/$name"
done
{ echo "ADDRESS=$address"; echo "SHARE=${share:+1}"; } >"$work/add/w/settings"
{
    for pair in "SWITCHYARD_RXE_ACCEL=$accel" ${environment[@]+"${environment[@]}"}; do
        printf 'export %q\n' "$pair"
    done
    if [ $# -eq 1 ]; then printf '%s\n' "$1"; else printf '%q ' "$@"; echo; fi
} >"$work/add/w/command"
pack "$work/add" >"$work/add.cpio"
cat "$bed/base.cpio" "$work/add.cpio" >"$work/initrd"
rm -rf "$work/add" "$work/add.cpio"
: >"$work/out"
: >"$work/status"

if [ -n "$link" ]; then
    netdev="dgram,id=n0,local.type=unix,local.path=${link%%:*},remote.type=unix,remote.path=${link#*:}"
else
    netdev=hubport,id=n0,hubid=0
fi
folder=()
[ -n "$share" ] && folder=(-virtfs "local,path=$share,mount_tag=share,security_model=none,multidevs=remap")
start=$(date +%s%N)
qemu-system-x86_64 -nodefaults -no-user-config "${processor[@]}" -smp "$cpus" -m "$memory" \
    -kernel "$bed/vmlinux" -initrd "$work/initrd" \
    -append "console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable no_timer_check rdinit=/init" \
    -display none -no-reboot -device isa-debug-exit,iobase=0xf4,iosize=1 \
    -serial "file:$work/console" -serial "file:$work/out" -serial "file:$work/status" \
    -netdev "$netdev" ${folder[@]+"${folder[@]}"} \
    -device "virtio-net-pci,netdev=n0,mac=$(printf '52:54:00:07:00:%02x' "${address##*.}"),romfile=,speed=10000,duplex=full" \
    ${second[@]+"${second[@]}"} </dev/null >"$work/qemu.log" 2>&1 &
qemu=$!
tail -c +1 -f --pid=$qemu -s 0.1 "$work/out" &
reader=$!
end=$((SECONDS + limit)) late=''
while kill -0 $qemu 2>/dev/null; do
    if [ $SECONDS -ge $end ]; then late=1; kill -9 $qemu; break; fi
    # The report counts; whether the machine manages to switch itself off does not.
    if grep -qa '^RC=' "$work/status"; then sleep 0.3; kill $qemu 2>/dev/null; break; fi
    sleep 0.1
done
{ wait $qemu; qemu=''; wait $reader; reader=''; } 2>/dev/null
status=$(tr -d '\r' <"$work/status" | grep -ao '^RC=.*' | tail -n1)
[ -n "$quiet" ] || say "$accel, $(( ($(date +%s%N) - start) / 1000000 )) ms, ${late:+stopped at the limit of $limit s, }${status:-no report}"
if [ -z "$status" ]; then
    { echo "--- end of the guest's console"; tail -c 3000 "$work/console"; cat "$work/qemu.log"; } >&2
    [ -n "$late" ] && exit 124
    exit 250
fi
code=${status#RC=}
exit "${code%% *}"
