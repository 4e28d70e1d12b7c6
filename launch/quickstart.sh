#!/usr/bin/env bash
# From a fresh checkout to a trained model: sets up .venv, then runs `dynapipe quickstart` with the arguments given here.
#
#   bash launch/quickstart.sh                     8 ranks on this machine, or as many as its GPUs suffice for
#   bash launch/quickstart.sh --steps 5 --help    any argument of `dynapipe train`
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=launch/setup.sh
source "$root/launch/setup.sh"

dynapipe_setup "$root" train
echo "dynapipe: starting dynapipe quickstart $*" >&2
exec "$root/.venv/bin/dynapipe" quickstart "$@"
