#!/usr/bin/env bash
# Bring the sandbox up, serve a model on its two nodes with real vLLM, ask it something, and say what to type next.
set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS
ansible-playbook playbooks/sandbox.yml --tags up
ansible-playbook playbooks/serve.yml -i inventories/sandbox
echo
ansible-playbook playbooks/status.yml -i inventories/sandbox | sed -n '/^alpha/,/^$/p' | grep -v '^ok:'
cat <<TEXT

The demo took $((SECONDS - started)) s. What to type next (first: source .venv/bin/activate):

  ansible-playbook playbooks/serve.yml  -i inventories/sandbox     # again: nothing changes, about two seconds
  ansible-playbook playbooks/status.yml -i inventories/sandbox     # one table per cluster
  ansible-playbook playbooks/stop.yml   -i inventories/sandbox     # stop both ranks, confirmed
  ansible-playbook playbooks/render.yml                            # the docker run of each rank of inventories/spark
  make clean                                                       # remove every trace of the sandbox
TEXT
