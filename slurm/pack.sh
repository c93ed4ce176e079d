#!/usr/bin/env bash
# pack.sh [ARCHIVE]   packs the environment of $PYTHON, its interpreter and this checkout into one file; default env.tar
#
#   slurm/pack.sh                                     on a login node, and again after every change
#   ENV_ARCHIVE=env.tar slurm/train.sh run.toml       the job copies it to each node's own disk and runs from there
#
# Beside it goes ARCHIVE.info: sizes, checksum, and which files it was made of. An interpreter below /usr is part of
# every node and stays out. PYTHON=... packs another environment, a virtual one or a whole installation.
set -euo pipefail

CHECKOUT="${CHECKOUT:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)}"
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$CHECKOUT/slurm/lib.sh"
set_up

archive="${1:-env.tar}"
folder="$(dirname -- "$archive")"
if [[ ! -d "$folder" || ! -w "$folder" ]]; then
    fail "$folder is no folder that can be written to" "slurm/pack.sh \$HOME/env.tar   # where the jobs' nodes see it"
fi
find_parts
work="$(mktemp -d)"
trap 'rm -rf "$work" "$archive.part" "$archive.info.part"' EXIT
mkdir -p "$work/checkout" "$work/base/bin" "$work/base/lib"

# A name with /. at its end is the folder that the link leads to; links inside of it stay links.
members=() left_out=()
for part in "${ENV_CODE[@]}"; do
    ln -s "$CHECKOUT/$part" "$work/checkout/$part"
    members+=("checkout/$part/.")
done
ln -s "$ENV_PREFIX" "$work/env"
members+=(env/.)
if [[ -n "$ENV_BASE" ]]; then
    cp -L "$ENV_BASE/bin/$ENV_NAME" "$work/base/bin/"
    ln -s "$ENV_BASE/lib/$ENV_NAME" "$work/base/lib/$ENV_NAME"
    members+=(base/bin "base/lib/$ENV_NAME/.")
    for library in "$ENV_BASE/lib/lib$ENV_NAME"*.so*; do
        if [[ ! -e "$library" ]]; then continue; fi
        cp -P "$library" "$work/base/lib/"
        members+=("base/lib/${library##*/}")
    done
    for name in test idlelib tkinter 'config-*'; do left_out+=("--exclude=base/lib/$ENV_NAME/./$name"); done
    if ! grep -qi '^include-system-site-packages *= *true' "$ENV_PREFIX/pyvenv.cfg"; then
        left_out+=("--exclude=base/lib/$ENV_NAME/./site-packages")
    fi
fi

# Compiled now, or each job would do it on each node.
for part in hpczero scaling; do
    if [[ ! -d "$CHECKOUT/$part" ]]; then continue; fi
    "$PYTHON" -m compileall -q "$CHECKOUT/$part" || say "not all of $part can be compiled; jobs will do it each time"
done
made_of="$(fingerprint)"
tar -C "$work" -cf "$archive.part" --anchored --exclude=checkout/scaling/./results "${left_out[@]}" "${members[@]}"
if [[ "$(fingerprint)" != "$made_of" ]]; then
    fail "$ENV_PREFIX or $CHECKOUT changed while it was packed" "slurm/pack.sh $archive   # while nobody changes it"
fi
checksum="$(sha256sum <"$archive.part")"
printf '%s %s\n' sha256 "${checksum%% *}" bytes "$(stat -c %s "$archive.part")" made_of "$made_of" >"$archive.info.part"
rm -f "$archive.info" # a job that starts now must not take the new file for the old one
mv "$archive.part" "$archive"
mv "$archive.info.part" "$archive.info"
say "packed $ENV_PREFIX${ENV_BASE:+, $ENV_BASE} and $CHECKOUT: $archive, $(($(stat -c %s "$archive") / 1000000)) MB"
