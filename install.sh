#!/bin/sh
# Makes the virtual environment $2 with the interpreter $1: pinned dependencies, this package, its test tools.
# The build of torch is $3: cpu (hundreds of megabytes less), cuda, or auto: cuda where there is a GPU.
# A set-up that was cut off goes on with the same command.
set -eu
python=$1
venv=$2
build=${3:-auto}
torch=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' constraints.txt)

fail() {
    echo "error: $1" >&2
    exit 2
}
command -v "$python" >/dev/null || fail "there is no $python here; name a Python 3.11 to 3.13: make setup PYTHON=python3.12"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed; name one with: make setup PYTHON=python3.12"
[ "$(df -Pk . | awk 'NR == 2 { print $4 }')" -gt 4000000 ] || fail "the set-up needs 4 GB of disk: make room and call it again"
version='import sys; print(sys.version_info[:2])'
[ "$("$venv/bin/python" -c "$version" 2>/dev/null)" = "$("$python" -c "$version")" ] ||
    "$python" -m venv --clear "$venv" || fail "$python makes no environment: install its venv module (python3-venv) and call this again"
install() {
    "$venv/bin/python" -m pip --quiet --disable-pip-version-check install --no-compile "$@"
}
installed() {
    install "$@" || fail "pip could not install what is needed: see above; with PyPI in reach the same command goes on"
}

if [ "$build" = auto ]; then
    build=cuda
    [ "$(uname -s)" != Linux ] || nvidia-smi >/dev/null 2>&1 || build=cpu
fi
if [ "$build" = cpu ]; then
    echo "installing the CPU build of torch $torch"
    install "torch==$torch+cpu" 2>/dev/null ||
        installed "torch==$torch" --index-url https://download.pytorch.org/whl/cpu
else
    echo "installing torch $torch"
    installed "torch==$torch"
fi
echo "installing the other dependencies"
installed --constraint constraints.txt --editable ".[test]"
# on all cores, where pip would use one, but for what nobody here imports; some packages ship templates that are no Python
"$venv/bin/python" -m compileall -qq -j 0 -x '/tests?/|/transformers/models/' "$venv/lib" || true
