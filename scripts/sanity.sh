#!/usr/bin/env bash
# antsibull-docs and ansible-test sanity over what git would ship. ansible-test wants a real …/ansible_collections/gb10/fleet path, so the files are
# copied; its virtual environments live in .cache and are made once.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cache=$root/.cache/sanity
copy=$cache/copy/ansible_collections/gb10/fleet
cd "$root"
rm -rf "$cache/copy"
mkdir -p "$copy" "$cache/home/.ansible/test/cache"
git ls-files --cached --others --exclude-standard -z -- . ':!collections' ':!molecule' ':!tests' ':!benchmarks' ':!scripts' ':!.ci' ':!.config' |
  while IFS= read -r -d '' file; do if [ -e "$file" ]; then printf '%s\0' "$file"; fi; done |
  tar --null --files-from=- -cf - | tar -xf - -C "$copy"
if [ -d tests/sanity ]; then mkdir -p "$copy/tests" && cp -r tests/sanity "$copy/tests/"; fi
cd "$copy"
# ansible-test asks git for the files of the collection.
git -c init.defaultBranch=main init -q . && git add -A

# The same copy for the documentation: antsibull-docs copies all that lies in a collection's folder, .venv included.
PATH=$root/.venv/bin:$PATH ANSIBLE_COLLECTIONS_PATH=$cache/copy \
  antsibull-docs lint-collection-docs --plugin-docs --validate-collection-refs=all --skip-rstcheck .

# ansible-test downloads pip's installer for the environments that it makes; Python brings one, which needs no download.
"$root/.venv/bin/python" - "$cache/home/.ansible/test/cache" <<'PY'
import pathlib, sys
from ansible_test._internal.python_requirements import get_venv_packages  # the version that this ansible-test asks for
import inspect, re
version = re.search(r"pip='([0-9.]+)'", inspect.getsource(get_venv_packages)).group(1)
installer = """import subprocess, sys
subprocess.check_call([sys.executable, "-m", "ensurepip"], stdout=subprocess.DEVNULL)
words = [w for w in sys.argv[1:] if w not in ("--no-setuptools", "--no-wheel")]
sys.exit(subprocess.call([sys.executable, "-m", "pip", "install", *words]))
"""
(pathlib.Path(sys.argv[1]) / f"get_pip_{version.replace('.', '_')}.py").write_text(installer)
PY
# It also clears the environment: pip's settings of this machine (index, certificates) go with it as a file.
mkdir -p "$cache/home/.config/pip"
{ printf '[global]\nquiet = 2\n'; "$root/.venv/bin/pip" config list | sed -n "s/^\(:env:\|global\|user\)\.\([^=]*\)='\(.*\)'$/\2 = \3/p" | tac | sort -u -t= -k1,1; } \
  >"$cache/home/.config/pip/pip.conf"
export HOME=$cache/home
export ANSIBLE_COLLECTIONS_PATH=$cache/copy PATH=$root/.venv/bin:$PATH LC_ALL=C.UTF-8
unset ANSIBLE_CONFIG
# One Python is enough here: ruff holds node code to 3.10, and pyenv's shims of other versions answer without being one.
# Programs of roles (files/) are no modules: ruff and mypy check them, and their shebangs and names are a program's.
exec ansible-test sanity --exclude roles/ --local --color no --python "$(python -c 'import sys; print("%d.%d" % sys.version_info[:2])')" "$@"
