#!/bin/sh
# Makes the virtual environment $2 with the interpreter $1: dependencies and test tools as constraints*.txt pin them,
# each file compared with its SHA-256, and this package. Other clones share the dependencies' files by hard links, which
# take no second 3.6 GB; the files are read-only, so that no clone changes another's.
# The build of torch is $3: cpu (hundreds of megabytes less), cuda, or auto: cuda where there is a GPU.
# A set-up that was cut off goes on with the same command.
set -eu
python=$1
venv=$2
build=${3:-auto}

fail() {
    echo "error: $1" >&2
    exit 2
}
started=$(date +%s)
step() { # $1 says what begins, $2 the percent of the time that a set-up has taken when it does
    echo "$1: about $((($(date +%s) - started) * (100 - $2) / $2 / 60 + 1)) min left"
}
command -v "$python" >/dev/null || fail "there is no $python here; name a Python 3.11 to 3.13: make setup PYTHON=python3.12"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed; name one with: make setup PYTHON=python3.12"
[ "$build" != auto ] || {
    build=cuda
    [ "$(uname -s)" != Linux ] || nvidia-smi >/dev/null 2>&1 || build=cpu
}
made="$("$python" -c 'import sys; print(sys.version, sys.prefix)') $build $(cat constraints*.txt | cksum)"
cache="${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/mlm-repro/environment" # stored scores and more lie beside it
shared=no # an environment that is complete may have packages of the user's, which a replacement would lose
[ -e "$venv/.ready" ] || [ "$(cat "$cache/made" 2>/dev/null)" != "$made" ] || shared=yes
if [ $shared = yes ]; then
    echo "making $venv of the files in $cache, which another clone installed"
else
    [ "$(df -Pk . | awk 'NR == 2 { print $4 }')" -gt 4000000 ] || fail "the set-up needs 4 GB of disk: make room and call it again"
    echo "making $venv: 3.6 GB, three minutes on two quiet cores, and what the download takes; another clone then takes seconds"
fi
version='import sys; print(sys.version_info[:2])'
[ "$("$venv/bin/python" -c "$version" 2>/dev/null)" = "$("$python" -c "$version")" ] ||
    "$python" -m venv --clear "$venv" || fail "$python makes no environment: install its venv module (python3-venv) and call this again"
install() {
    "$venv/bin/python" -m pip --quiet --disable-pip-version-check install --no-compile --no-deps "$@"
}
installed() {
    install "$@" || fail "pip could not install what is needed: see above; with PyPI in reach the same command goes on"
}

place=$(cd "$venv" && pwd)
if [ $shared = yes ]; then
    rm -rf "$venv/lib"
    cp -Rl "$cache/lib" "$venv" 2>/dev/null || cp -R "$cache/lib" "$venv"
    before=$(cat "$cache/place")
    for script in "$cache"/bin/*; do # pip wrote the environment's path into those that are text
        [ -e "$venv/bin/${script##*/}" ] || LC_ALL=C sed "s|$before|$place|" "$script" >"$venv/bin/${script##*/}"
    done
    chmod +x "$venv"/bin/*
else
    step "installing torch, its $build build" 7
    if [ "$build" = cpu ]; then
        install --requirement constraints-cpu.txt 2>/dev/null ||
            installed --requirement constraints-cpu.txt --extra-index-url https://download.pytorch.org/whl/cpu
    else
        installed --requirement constraints-cuda.txt
    fi
    step "installing $(grep -c == constraints.txt) other packages" 17
    installed --no-build-isolation --requirement constraints.txt
    step "compiling on all cores" 80
    # on all cores, where pip would use one, but for what nobody here imports; some packages ship templates that are no Python
    "$venv/bin/python" -m compileall -qq -j 0 -x '/tests?/|/transformers/models/' "$venv/lib" || true
    rm -rf "$cache.new"
    if mkdir -p "$cache.new" 2>/dev/null && cp -Rl "$venv/lib" "$venv/bin" "$cache.new" 2>/dev/null; then
        find "$venv/lib" -type f -exec chmod a-w {} +
        echo "$place" >"$cache.new/place"
        echo "$made" >"$cache.new/made"
        rm -rf "$cache"
        mv "$cache.new" "$cache"
    fi
    rm -rf "$cache.new"
fi
installed --no-build-isolation --editable .
seconds=$(($(date +%s) - started))
echo "done in $((seconds / 60)):$(printf %02d $((seconds % 60))): $venv takes $(du -sh "$venv" | cut -f1)"
