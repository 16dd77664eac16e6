#!/bin/sh
# Print the path of a Python that the controller can use (3.12 - 3.14), or say what to install.
# Looks on PATH first, then among pyenv's versions: the default `python3` is often older.
set -u
usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }
for name in python3.13 python3.14 python3.12 python3; do
  path=$(command -v "$name" 2>/dev/null) && usable "$path" && { echo "$path"; exit 0; }
done
for path in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[234]*/bin/python3; do
  [ -x "$path" ] && usable "$path" && { echo "$path"; exit 0; }
done
echo "No Python 3.12, 3.13 or 3.14 with venv was found (looked on PATH and in ${PYENV_ROOT:-$HOME/.pyenv}/versions)." >&2
echo "Install one, for example: apt-get install python3.13 python3.13-venv   or: pyenv install 3.13" >&2
exit 1
