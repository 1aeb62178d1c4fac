#!/bin/sh
# Print the path of a working Python 3.12, from PATH or from pyenv, or say in one sentence that there is none.

is_wanted() {
    "$1" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1
}

for candidate in python3.12 python3 python; do
    # A pyenv shim is on PATH even where its version is not selected, so a candidate has to run.
    if is_wanted "$candidate"; then
        command -v "$candidate"
        exit 0
    fi
done

pyenv_root="${PYENV_ROOT:-$HOME/.pyenv}"
for candidate in "$pyenv_root"/versions/3.12*/bin/python; do
    if is_wanted "$candidate"; then
        echo "$candidate"
        exit 0
    fi
done

echo "No Python 3.12 was found on PATH or in pyenv; install it (for example: pyenv install 3.12), then try again." >&2
exit 1
