#!/bin/bash
# Builds the Soft-RoCE test bed: Debian's kernel with rdma_rxe, and an initramfs with busybox, the
# verbs user space and its tools. Nothing of it is installed; everything lands in
# ~/.cache/switchyard/rxe-<kernel version>-<hash of these scripts and of the verbs packages>.
#
#   tests/rxe/build.sh            prints the folder; takes a minute once, then nothing
#
# Needs Debian's packages (root only for installing them):
#   qemu-system-x86 busybox-static ibverbs-providers ibverbs-utils rdmacm-utils perftest iproute2
#   kmod cpio xz-utils
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
. "$here/lib.sh"
PATH=$PATH:/usr/sbin:/sbin

for tool in qemu-system-x86_64 busybox ibv_devinfo rping ib_write_lat ip rdma depmod cpio dpkg xz apt-get; do
    command -v "$tool" >/dev/null || die "$tool is missing; install the packages named at the head of $0"
done
version=$(kernel_version)
[ -n "$version" ] || die "apt knows no linux-image-amd64; run apt-get update"
state=$(cat "$here"/build.sh "$here"/init "$here"/lib.sh; dpkg-query -W libibverbs1 ibverbs-providers perftest busybox-static)
bed=$(cache_root)/rxe-$version-$(printf %s "$state" | sha256sum | cut -c1-8)
mkdir -p "$bed"
exec 9>"$bed/lock"
flock -w 600 9 || die "another build of $bed has held its lock for ten minutes"
if [ -e "$bed/complete" ]; then echo "$bed"; exit; fi

work=$bed/work
rm -rf "$work"
mkdir -p "$work/kernel"
# The package is kept across rebuilds with other scripts.
package=$(cache_root)/linux-image-$version.deb
if ! dpkg-deb --info "$package" >/dev/null 2>&1; then
    say "downloading linux-image-$version"
    (cd "$work" && timeout 300 apt-get download -qq "linux-image-$version" 2>&1 | grep -v unsandboxed || true)
    [ -n "$(find "$work" -name 'linux-image-*.deb')" ] || die "cannot download linux-image-$version"
    mv "$work"/linux-image-*.deb "$package"
fi
dpkg-deb -x "$package" "$work/kernel"
depmod -b "$work/kernel" "$version"

# QEMU starts an uncompressed kernel by PVH, which spares an emulated processor the decompression.
python3 - "$work/kernel/boot/vmlinuz-$version" "$bed/vmlinux" <<'PY'
import lzma, sys
image = open(sys.argv[1], "rb").read()
start = image.find(b"\xfd7zXZ\x00")
if start < 0:
    sys.exit("rxe: the kernel image is not compressed by xz")
open(sys.argv[2], "wb").write(lzma.LZMADecompressor(format=lzma.FORMAT_XZ).decompress(image[start:]))
PY

root=$work/root
mkdir -p "$root"/{bin,dev,etc/libibverbs.d,lib,lib64,modules,mnt,proc,run,sys,tmp,usr/bin,w}
cp "$(command -v busybox)" "$root/bin/busybox"
for applet in $(busybox --list); do
    case $applet in busybox | ip) ;; *) ln -s busybox "$root/bin/$applet" ;; esac
done

# Modules in the order in which they must be loaded. crc32_generic is what rxe's checksums use.
for module in virtio_pci virtio_net crc32c_generic crc32_generic libcrc32c rdma_rxe rdma_ucm ib_umad 9pnet_virtio 9p; do
    { modprobe -d "$work/kernel" -S "$version" --show-depends "$module" 2>/dev/null || true; } |
        sed -n 's/^insmod \([^ ]*\).*/\1/p'
done | awk '!seen[$0]++' | while read -r module; do
    cp "$module" "$root/modules/"
    basename "$module" >>"$root/modules/order"
done
grep -q '^rdma_rxe' "$root/modules/order" || die "linux-image-$version has no rdma_rxe"

for program in ip rdma ibv_devinfo ibv_devices ibv_rc_pingpong rping ib_write_lat ib_write_bw ib_read_lat ib_read_bw ib_atomic_lat ib_atomic_bw; do
    copy_with_libraries "$(command -v $program)" "$root/usr/bin/$program" "" "$root"
done
copy_with_libraries /etc/libibverbs.d/rxe.driver "$root/etc/libibverbs.d/rxe.driver" "" "$root"
plugins=$(echo /usr/lib/*/libibverbs)
copy_with_libraries "$plugins"/librxe-rdmav*.so "$root$plugins/$(basename "$plugins"/librxe-rdmav*.so)" "" "$root"
# What Rust programs are linked with beside the verbs libraries.
for library in libgcc_s.so.1 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libibverbs.so.1 librdmacm.so.1; do
    path=$(ldconfig -p | sed -n "s/.*$library .*x86-64.* => //p" | head -n1)
    if [ -n "$path" ]; then copy_with_libraries "$path" "$root$path" "" "$root"; fi
done
echo 'root:x:0:0:root:/:/bin/sh' >"$root/etc/passwd"
echo '127.0.0.1 localhost' >"$root/etc/hosts"
cp "$here/init" "$root/init"
chmod +x "$root/init"
pack "$root" >"$bed/base.cpio"
mv "$root" "$bed/root"
rm -rf "$work"
touch "$bed/complete"
say "built $bed ($(du -sh "$bed" | cut -f1))"
echo "$bed"
