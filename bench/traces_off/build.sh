#!/usr/bin/env bash
# Builds two commands for `compare.py`: `ordinary`, and `without`, in which client and CPU server have none of the
# statements for traces on the path of a layer.
#
#   bench/traces_off/build.sh FOLDER [CARGO-OPTION…]
#
# Both come from one copy of the tree at HEAD in FOLDER, so that paths in them are the same. Options of cargo are
# `--release` unless given. CARGO_TARGET_DIR may name a folder with builds of other crates.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$(realpath -m "${1:?give a folder for the copy and the commands}")
shift
[ $# -gt 0 ] || set -- --release

tree=$folder/tree
rm -rf "$tree"
mkdir -p "$tree"
git -C "$(git -C "$here" rev-parse --show-toplevel)" archive --format tar HEAD | tar -x -C "$tree"
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$folder/target}

build() { # name, options of cargo…
    local name=$1 binary
    shift
    binary=$(cd "$tree" && "${CARGO:-cargo}" build --locked -p switchyard-cli --bin switchyard "$@" \
        --message-format json-render-diagnostics |
        python3 -c 'import json, sys; print([m["executable"] for m in map(json.loads, sys.stdin) if m.get("executable")][-1])')
    cp "$binary" "$folder/$name"
}

build ordinary "$@"
# A patch that no longer fits ends the script here.
patch --quiet -p1 --fuzz 0 -d "$tree" <"$here/without.patch"
build without "$@"
if cmp -s "$folder/ordinary" "$folder/without"; then
    echo "error: both commands are the same bytes, so the patch had no effect" >&2
    exit 1
fi
echo "$folder/ordinary and $folder/without"
