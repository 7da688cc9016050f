#!/bin/sh
# Makes the virtual environment $2 with the interpreter $1: pinned dependencies, this package, its test tools.
# The build of torch is $3: cpu (hundreds of megabytes less), cuda, or auto: cuda where there is a GPU.
set -eu
python=$1
venv=$2
build=${3:-auto}
torch=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' constraints.txt)

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: Python 3.11 or newer is needed; name one with: make setup PYTHON=python3.12" >&2
    exit 2
}
"$python" -m venv "$venv"
install="$venv/bin/python -m pip --quiet --disable-pip-version-check install --no-compile"

if [ "$build" = auto ]; then
    build=cuda
    [ "$(uname -s)" != Linux ] || nvidia-smi >/dev/null 2>&1 || build=cpu
fi
if [ "$build" = cpu ]; then
    echo "installing the CPU build of torch $torch"
    $install "torch==$torch+cpu" 2>/dev/null ||
        $install "torch==$torch" --index-url https://download.pytorch.org/whl/cpu
else
    echo "installing torch $torch"
    $install "torch==$torch"
fi
echo "installing the other dependencies"
$install --constraint constraints.txt --editable ".[test]"
# on all cores, where pip would use one, but for what nobody here imports; some packages ship templates that are no Python
"$venv/bin/python" -m compileall -qq -j 0 -x '/tests?/|/transformers/models/' "$venv/lib" || true
