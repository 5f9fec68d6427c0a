# Shared by the scripts in this folder: where the test bed is cached, and how to complain.

say() { printf 'rxe: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

# The kernel that Debian's metapackage stands for, e.g. 6.1.0-30-amd64. Prints nothing when apt does
# not know it.
kernel_version() {
    apt-cache depends linux-image-amd64 2>/dev/null |
        sed -n 's/^ *Depends: linux-image-\([0-9][^ ]*\)$/\1/p' | head -n1
}

cache_root() { printf '%s/switchyard' "${XDG_CACHE_HOME:-$HOME/.cache}"; }

# Folder of the newest finished test bed: SWITCHYARD_RXE_DIR, or what build.sh made.
bed() {
    if [ -n "${SWITCHYARD_RXE_DIR:-}" ]; then printf '%s' "$SWITCHYARD_RXE_DIR"; return; fi
    local newest
    newest=$(ls -1dt "$(cache_root)"/rxe-*/complete 2>/dev/null | head -n1)
    printf '%s' "${newest%/complete}"
}

# Copies a program or library into a root folder together with the shared libraries that it asks for,
# leaving out what already is in the root folder given third.
copy_with_libraries() {
    local file=$1 target=$2 present=$3 root=$4 library
    mkdir -p "$(dirname "$target")"
    cp -L "$file" "$target"
    # Not everything has libraries: ldd fails for static programs and scripts.
    { ldd "$file" 2>/dev/null | grep -o '/[^ ]*' || true; } | while read -r library; do
        if [ -e "$root$library" ] || { [ -n "$present" ] && [ -e "$present$library" ]; }; then continue; fi
        mkdir -p "$root$(dirname "$library")"
        cp -L "$library" "$root$library"
    done
}

pack() { (cd "$1" && find . -mindepth 1 | cpio --quiet --create --format=newc --owner=0:0); }
