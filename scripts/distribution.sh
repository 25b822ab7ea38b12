#!/usr/bin/env bash
# Build the wheel and the sdist, install each into an environment without it, and run what the README shows from the wheel.
#
#     scripts/distribution.sh [DIRECTORY]     # where the files go; a temporary one otherwise
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
dist=$(realpath -m "${1:-$work/dist}")

# From the files of the repository alone: what lies beside them must not be needed.
mkdir "$work/source"
git -C "$root" ls-files -z | (cd "$root" && tar --null -T - -cf -) | tar -xf - -C "$work/source"
python3 -m venv --upgrade-deps "$work/builder"
"$work/builder/bin/pip" install -q --no-compile -c "$root/constraints.txt" build
"$work/builder/bin/python" -m build -q --outdir "$dist" "$work/source"

python3 -m venv --upgrade-deps "$work/env"
for file in "$dist"/penstock_train-*.whl "$dist"/penstock_train-*.tar.gz; do
  echo "+ $(basename "$file") in an environment without it"
  rm -rf "$work/run" && mkdir "$work/run"
  "$work/env/bin/pip" install -q --no-compile -c "$root/constraints.txt" "$file"
  (
    cd "$work/run" # not in the checkout, whose source would be found first
    "$work/env/bin/penstock" --version
    "$work/env/bin/python" - <<'PYTHON'
from importlib.metadata import version

from penstock import __version__
from penstock.update.host_threads import host_library

assert version("penstock-train") == __version__
assert host_library() is not None, "the C kernel was not built"
PYTHON
    [ "${file##*.}" = whl ] || exit 0 # the same bytes, as the lists below say: what runs from one runs from both
    "$work/env/bin/penstock" train demo --max-steps 4 --quiet
    "$work/env/bin/penstock" report runs/demo
    "$work/env/bin/penstock" generate runs/demo "What is the capital of Italy?" > /dev/null
  )
  cat "$work"/env/lib/python*/site-packages/penstock_train-*.dist-info/RECORD | grep '^penstock/.*,sha256=' \
    | sed 's/\.so,.*/.so/' | sort > "$work/files.${file##*.}" # with checksums, but of what was compiled
  "$work/env/bin/pip" uninstall -q -y penstock-train # what is left are its dependencies, which both have
done
diff "$work/files.whl" "$work/files.gz"
echo "+ both work"
